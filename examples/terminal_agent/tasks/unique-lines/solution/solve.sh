#!/bin/bash
LC_ALL=C sort -u /app/words.txt > /app/unique.txt
