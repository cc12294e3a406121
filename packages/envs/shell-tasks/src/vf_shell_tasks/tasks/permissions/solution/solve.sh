#!/bin/bash
set -euo pipefail
cd /app
chmod -R u+rwX site
find site -type d -exec chmod 755 {} +
find site -type f -exec chmod 644 {} +
find site -name '*.sh' -exec chmod 750 {} +
chmod -R go= site/private
