#!/bin/sh
# Changes the code of core one place at a time, and prints each change that no test notices: a survivor.
#   mutants.sh OUT [FILE-GLOB...]     OUT: the folder for the results; without globs all of core
# The tests of core run for each mutant; those of guard, which need root and mounts, for the survivors alone. Fails on a survivor
# that mutants-expected does not list with a reason, and on a listed mutant that is no survivor any more.
set -euf
here=$(cd "$(dirname "$0")" && pwd)
out=$1; shift
mkdir -p "$out"

# Incremental builds of one crate: a mutant takes seconds. The flags of a release are not needed.
unset RUSTFLAGS
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=1
mutants() { # RESULT TEST-PACKAGES MORE...
  result=$1; packages=$2; shift 2
  rm -rf "$result"
  # exit status 2: survivors; 3: a mutant that ran too long
  cargo mutants --package bindguard-core --test-package "$packages" --no-shuffle --colors never --timeout 300 --output "$result" "$@" ||
    case $? in 2 | 3) ;; *) return 1 ;; esac
}

for glob in "$@"; do files="${files:-} --file $glob"; done
# shellcheck disable=SC2086
mutants "$out/core" bindguard-core ${files:-}
cp "$out/core/mutants.out/missed.txt" "$out/survivors.txt"
if [ -s "$out/survivors.txt" ]; then
  # each survivor's name as a regular expression
  sed 's/[][\.|$(){}?+*^]/\\&/g; s/^/^/; s/$/$/' "$out/survivors.txt" > "$out/names"
  set --
  while read -r name; do set -- "$@" --re "$name"; done < "$out/names"
  for file in $(cut -d : -f 1 "$out/survivors.txt" | sort -u); do set -- "$@" --file "$file"; done
  mutants "$out/guard" bindguard-guard "$@"
  # cargo-mutants makes some mutants that no --re names
  grep -Fxf "$out/survivors.txt" "$out/guard/mutants.out/missed.txt" > "$out/both" || true
  mv "$out/both" "$out/survivors.txt"
fi

# Without lines and columns, which move.
sed -E 's/^([^:]*):[0-9]+:[0-9]+: /\1: /' "$out/survivors.txt" | sort > "$out/found"
sed -n 's/^\([^#].*[^ ]\)  *# .*/\1/p' "$here/mutants-expected" | sort > "$out/expected"
mutated=$(cat "$out"/core/mutants.out/caught.txt "$out"/core/mutants.out/timeout.txt "$out"/core/mutants.out/missed.txt | wc -l)
unexpected=$(comm -23 "$out/found" "$out/expected")
# A run over some files does not meet the other files' mutants.
if [ -z "${files:-}" ]; then gone=$(comm -13 "$out/found" "$out/expected"); else gone=; fi
echo "$mutated mutants, $(wc -l < "$out/found") survivors"
if [ -n "$unexpected" ]; then
  echo "$unexpected" | sed 's/^/survives without a reason in integration\/mutants-expected: /'
  exit 1
fi
if [ -n "$gone" ]; then
  echo "$gone" | sed 's/^/is no survivor any more, remove it from integration\/mutants-expected: /'
  exit 1
fi
