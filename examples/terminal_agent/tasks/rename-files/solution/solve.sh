#!/bin/bash
cd /app && for f in *.txt; do mv "$f" "${f%.txt}.md"; done
