#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/service.ini)" = "$(printf "[service]\nname = shop\nport = 9090\nbacklog = 8080")" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
