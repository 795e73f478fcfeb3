#!/bin/sh
# The NEON kernels on machines that have no NEON: builds test_reduce for aarch64 and runs it under qemu-user. Skipped,
# with the reason, where the cross compiler or qemu is missing (Debian: gcc-aarch64-linux-gnu, qemu-user).
#
#   check_neon.sh SOURCE_ROOT WORK_DIR
set -eu
root=$1 work=$2

for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
	command -v "$tool" >/dev/null || {
		echo "SKIP neon: no $tool on this machine"
		exit 77
	}
done

mkdir -p "$work"
cd "$root"
# The flags of daemon/reduce/meson.build. Not the exhaustive tests: emulated they take most of a minute.
aarch64-linux-gnu-gcc -std=gnu17 -D_GNU_SOURCE -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math \
	-fno-strict-aliasing -Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers \
	-I. -Idaemon -Itests/lib -static \
	daemon/reduce/reduce.c daemon/reduce/average.c daemon/reduce/sum_scalar.c daemon/reduce/sum_neon.c \
	proto/types.c tests/unit/reduce/test_reduce.c tests/unit/reduce/reference.c tests/lib/test.c \
	-lm -pthread -o "$work/test-reduce-aarch64"
tests=$(qemu-aarch64 "$work/test-reduce-aarch64" --list | grep -v -e ^every_ -e larger_than_the_caches)
# shellcheck disable=SC2086 # names of tests are words
BPS_TEST_TIMEOUT_S=240 exec qemu-aarch64 "$work/test-reduce-aarch64" $tests
