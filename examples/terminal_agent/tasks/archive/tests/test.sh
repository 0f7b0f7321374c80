#!/bin/bash
mkdir -p /logs/verifier
if [ "$(tar -xzOf /app/docs.tar.gz docs/a.txt)" = alpha ] && [ "$(tar -xzOf /app/docs.tar.gz docs/b.txt)" = beta ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
