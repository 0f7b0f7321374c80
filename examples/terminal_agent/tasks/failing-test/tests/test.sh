#!/bin/bash
cd /app
mkdir -p /logs/verifier
if python3 -c 'from median import median; assert median([4, 1, 2, 3]) == 2.5 and median([9]) == 9 and median([5, 7]) == 6'; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
