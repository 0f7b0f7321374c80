#!/bin/bash
mkdir -p /logs/verifier
total=0 best=0
[ "$(tr -d "[:space:]" < /app/total.txt)" = 26 ] && total=1
[ "$(tr -d "[:space:]" < /app/best.txt)" = pear ] && best=1
echo "{\"total\": $total, \"best\": $best, \"reward\": $((total * best))}" > /logs/verifier/reward.json
