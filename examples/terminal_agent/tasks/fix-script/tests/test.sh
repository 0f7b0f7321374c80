#!/bin/bash
printf "1\n2\n40\n" > /app/numbers.txt
mkdir -p /logs/verifier
if [ "$(bash /app/total.sh)" = 43 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
