#!/bin/bash
ls -S /app/data | head -1 > /app/answer.txt
