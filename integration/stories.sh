#!/usr/bin/env bash
# Runs all tests, several at a time: stories.sh CARGO-TEST...
#
# Stories start real daemons, and a busy machine can be too slow for one of them. At most MAX_FLAKY tests that failed
# run again, each alone (0: none). A test that passes alone is printed as FLAKY; a test that fails twice fails the run.
set -uo pipefail

MAX_FLAKY=${MAX_FLAKY:-3}
# Stories about the shim and the guard run on the older containerds if OLDER is set.
skipped=(--skip ::older::)
[ -z "${OLDER:-}" ] || skipped=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Under nohup SIGHUP is ignored, and runc hands that on to some of its containers (3 of 60): their shells cannot trap SIGHUP.
set -- env --default-signal=HUP "$@"

# In the first run's output the word FAILED is replaced, so that a reader of the log finds it only at tests that fail the run.
"$@" --no-fail-fast --lib --bins --test it -- --test-threads 4 "${skipped[@]}" 2>&1 | tee "$log" | sed -u \
  -e 's/^\(test .*\) \.\.\. FAILED$/\1 ... failed beside others/' \
  -e 's/^test result: FAILED\. \([0-9]*\) passed; \([0-9]*\) failed;/test result: (\2-failed-beside-others) \1 passed; 0 failed;/'
status=${PIPESTATUS[0]}
[ "$status" -eq 0 ] && exit 0

mapfile -t failed < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$log" | sort -u)
if [ "${#failed[@]}" -eq 0 ] || [ "${#failed[@]}" -gt "$MAX_FLAKY" ] || grep -q "didn't exit successfully.*(signal" "$log"; then
  sed -n '/^test .* \.\.\. FAILED$/p' "$log"
  echo "${#failed[@]} tests failed, no second run" >&2
  exit "$status"
fi

for test in "${failed[@]}"; do
  echo "== once more, alone: $test"
  "$@" --lib --bins --test it -- --exact "$test" || exit
  echo "FLAKY $test: failed beside others, passed alone"
done
