#!/bin/sh
# Usage: check_exports.sh NM LIBRARY HEADER
# The library's dynamic symbols are exactly the functions that HEADER declares with SLICE_API, all of version SLICE_1.
set -eu
nm=$1 library=$2 header=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tr '\n' ' ' < "$header" | grep -oE 'SLICE_API [a-z_0-9 ]*[ *]+slice_[a-z0-9_]+\(' |
  sed -E 's/.*[ *](slice_[a-z0-9_]+)\($/\1@@SLICE_1/' | sort > "$work/declared"
"$nm" -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sort > "$work/exported"
count=$(wc -l < "$work/declared")
if [ "$count" -lt 20 ]; then
  echo "only $count functions found in $header: the pattern of this script is out of date" >&2
  exit 1
fi
diff "$work/declared" "$work/exported" || {
  echo "left: declared in slice.h; right: exported by the library" >&2
  exit 1
}
