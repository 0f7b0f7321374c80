#!/bin/bash
tar -C /app -czf /app/docs.tar.gz docs
