#!/bin/bash
# Prints the sum of the numbers in numbers.txt.
total=0
while read -r number; do
  total=$number
done < /app/numbers.txt
echo "$total"
