#!/bin/sh
# Schedules that once failed end well.
set -eu
sim=$1
for file in "$2"/*.txt; do
	[ ! -e "$file" ] || "$sim" --replay "$file"
done
