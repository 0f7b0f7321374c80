#!/bin/bash
cd /app
mkdir -p /logs/verifier
if [ "$(cat a.md)" = first ] && [ "$(cat b.md)" = second ] && [ -f c.csv ] && [ ! -e a.txt ] && [ ! -e b.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
