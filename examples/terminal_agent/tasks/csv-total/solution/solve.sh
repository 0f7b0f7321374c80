#!/bin/bash
awk -F, 'NR > 1 { t += $3 } END { print t }' /app/sales.csv > /app/total.txt
awk -F, 'NR > 1 { t[$2] += $3 } END { for (p in t) print t[p], p }' /app/sales.csv | sort -n | tail -1 | cut -d' ' -f2 > /app/best.txt
