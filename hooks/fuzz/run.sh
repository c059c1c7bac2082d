#!/bin/sh
# Fuzzes the readers, as many targets at once as there are processors.
#   run.sh SECONDS [TARGET...]   explore: random inputs for SECONDS per target; the corpus grows in target/fuzz/corpus
#   run.sh fixed [TARGET...]     check: the kept seeds and a fixed number of inputs from a fixed seed, the same in every run
# Findings are written to target/fuzz/findings; to reproduce one, pass its file to the target's program. Coverage comes from
# LLVM's own pass, so a stable toolchain suffices; `cargo fuzz run -s none TARGET` builds the same.
set -eu
mode=$1; shift
cd "$(dirname "$0")/../.."
triple=$(rustc -vV | sed -n 's/^host: //p')
out=$PWD/target/fuzz
[ $# -gt 0 ] || set -- mountinfo statmount spec kubelet_paths config

counters='-C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 -C llvm-args=-sanitizer-coverage-inline-8bit-counters'
tables='-C llvm-args=-sanitizer-coverage-pc-table -C llvm-args=-sanitizer-coverage-trace-compares'
RUSTFLAGS="--cfg fuzzing $counters $tables" cargo build --locked --quiet --release --target "$triple" \
  --manifest-path hooks/fuzz/Cargo.toml --target-dir "$out"

if [ "$mode" = fixed ]; then
  bound='-runs=20000 -seed=1'
  # libFuzzer writes new inputs to the first corpus: one of an earlier run would change the inputs of this one.
  corpus=$out/corpus-fixed
  rm -rf "$corpus"
else
  bound=-max_total_time=$mode
  corpus=$out/corpus
fi
for target in "$@"; do mkdir -p "$corpus/$target"; done
mkdir -p "$out/findings" "$out/seeds/config"
captured=hooks/core/tests/fixtures/kubelet-1.36
# the config that a node gets, with its keys uncommented
sed 's/^# \([a-z-]* = \)/\1/' config/config.toml > "$out/seeds/config/config.toml"

run() { # TARGET [MORE...]: memory and time for one input are bounded
  target=$1; shift
  log=$out/$target.log
  # shellcheck disable=SC2086
  if "$out/$triple/release/$target" $bound -rss_limit_mb=512 -timeout=10 -print_final_stats=1 \
    -artifact_prefix="$out/findings/$target-" "$@" >"$log" 2>&1
  then echo "fuzz $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, no finding"
  else echo "fuzz $target: FINDING"; grep -v '^#' "$log" | tail -n 30; return 1
  fi
}
one() {
  case $1 in
    mountinfo) run mountinfo "$corpus/mountinfo" hooks/fuzz/seeds/mountinfo $captured ;;
    statmount) run statmount "$corpus/statmount" hooks/fuzz/seeds/statmount ;;
    spec) run spec -dict=hooks/fuzz/json.dict "$corpus/spec" hooks/fuzz/seeds/spec $captured ;;
    kubelet_paths) run kubelet_paths -dict=hooks/fuzz/paths.dict "$corpus/kubelet_paths" hooks/fuzz/seeds/kubelet_paths ;;
    config) run config -dict=hooks/fuzz/config.dict "$corpus/config" "$out/seeds/config" ;;
    *) echo "run.sh: unknown target $1" >&2; return 2 ;;
  esac
}

# One batch of as many targets as there are processors after the other.
status=0 running=''
finish() { for pid in $running; do wait "$pid" || status=1; done; running=''; }
for target in "$@"; do
  one "$target" & running="$running $!"
  # shellcheck disable=SC2086
  [ "$(echo $running | wc -w)" -lt "$(nproc)" ] || finish
done
finish
exit $status
