#!/bin/bash
set -euo pipefail
cd /app
printf 'PARTS := $(sort $(wildcard part-*.txt))\n\nreport.txt: title.txt $(PARTS)\n\tcat title.txt $(PARTS) > $@\n\n.PHONY: clean\nclean:\n\trm -f report.txt\n' > Makefile
