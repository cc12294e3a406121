#!/bin/bash
set -euo pipefail
cd /app
cat > backup.sh <<'END'
#!/bin/bash
[ -d "$1" ] || exit 2
mkdir -p -- "$2" || exit 1
for file in "$1"/*; do
  [ -f "$file" ] || continue
  case $file in
    *.tmp) ;;
    *) cp -- "$file" "$2/" || exit 1 ;;
  esac
done
exit 0
END
