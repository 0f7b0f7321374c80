#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/unique.txt)" = "$(printf "apple\nfig\npear\nplum")" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
