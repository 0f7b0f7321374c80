#!/bin/bash
mkdir -p /logs/verifier
if [ "$(tr -d "[:space:]" < /app/answer.txt)" = two.bin ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
