#!/bin/sh
# One set of kernels, by name: on this processor where it has the instructions, else under the emulator where that has them. Skipped,
# with the reason, where neither does.
#
#   check_kernel.sh KERNEL EMULATOR REDUCE_PIPE TEST_REDUCE [TEST...]
#
# EMULATOR: qemu-x86_64; none: a sanitizer's shadow memory takes minutes to set up under it.
set -eu
kernel=$1 emulator=$2 pipe=$3 program=$4
shift 4
export BPS_TEST_KERNEL="$kernel"

if "$pipe" | grep -qx "$kernel"; then
	exec "$program" "$@"
fi
if [ "$emulator" = none ]; then
	echo "SKIP $kernel: this processor does not have $kernel, and what has a sanitizer is not emulated"
	exit 77
fi
if ! command -v "$emulator" >/dev/null; then
	echo "SKIP $kernel: this processor does not have $kernel, and there is no $emulator (Debian: qemu-user)"
	exit 77
fi
if ! "$emulator" -cpu max "$pipe" 2>/dev/null | grep -qx "$kernel"; then
	echo "SKIP $kernel: neither this processor nor qemu's has $kernel"
	exit 77
fi
# Not the exhaustive tests, as in check_neon.sh.
# shellcheck disable=SC2046 # names of tests are words
[ $# -gt 0 ] || set -- $("$program" --list | grep -v -e ^every_ -e larger_than_the_caches)
BPS_TEST_TIMEOUT_S=240 exec "$emulator" -cpu max "$program" "$@"
