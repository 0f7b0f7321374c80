#!/bin/bash
sed -i 's/total=$number/total=$((total + number))/' /app/total.sh
