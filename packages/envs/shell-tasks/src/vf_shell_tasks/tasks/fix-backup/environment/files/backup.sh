#!/bin/bash
mkdir $2
for f in $(ls $1); do
  case $f in
    *.tmp) ;;
    *) cp $1/$f $2 ;;
  esac
done
