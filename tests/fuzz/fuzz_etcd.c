/* What etcd answers, and what others may have written into it. The first byte says which. */
#include "cluster/etcd/wire.h"
#include "fuzz.h"

/* Reads all of it, so that a sanitizer sees what is not there. */
static void fuzz_touch(const void *data, size_t len)
{
	static volatile uint8_t sum;

	for (size_t i = 0; i < len; i++)
		sum = (uint8_t)(sum + ((const uint8_t *)data)[i]);
}

static void fuzz_range(const void *data, size_t len)
{
	struct etcd_range range;
	struct failure failure;

	if (etcd_unpack_range(data, len, &failure, &range))
		return;
	FUZZ_CHECK(range.revision > 0);
	for (size_t i = 0; i < range.n_kvs; i++) {
		fuzz_touch(range.kvs[i].key, range.kvs[i].key_len);
		fuzz_touch(range.kvs[i].value, range.kvs[i].value_len);
	}
	etcd_range_done(&range);
}

static void fuzz_watch(const void *data, size_t len)
{
	struct etcd_watch watch;
	struct failure failure;

	if (etcd_unpack_watch(data, len, &failure, &watch))
		return;
	fuzz_touch(watch.reason, strlen(watch.reason));
	for (size_t i = 0; i < watch.n_events; i++) {
		fuzz_touch(watch.events[i].kv.key, watch.events[i].kv.key_len);
		fuzz_touch(watch.events[i].kv.value, watch.events[i].kv.value_len);
	}
	etcd_watch_done(&watch);
}

static void fuzz_kept(const void *data, size_t len)
{
	struct view_member member;
	struct failure failure;
	struct view *view;
	bool accepted;

	if (!wire_unpack_member(data, len, &failure, &member))
		FUZZ_CHECK(*member.name && member.roles);
	if (!wire_unpack_view(data, len, 7, &failure, &view))
		view_unref(view);
	if (!wire_unpack_claim(data, len, 7, &failure, &view, &accepted))
		view_unref(view);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct failure failure;
	int64_t a, b;
	bool succeeded;

	if (!len)
		return 0;
	len--;
	switch (*data++ % 6) {
	case 0:
		fuzz_range(data, len);
		break;
	case 1:
		fuzz_watch(data, len);
		break;
	case 2:
		fuzz_kept(data, len);
		break;
	case 3:
		(void)etcd_unpack_txn(data, len, &failure, &a, &succeeded);
		break;
	case 4:
		if (!etcd_unpack_grant(data, len, &failure, &a, &b))
			FUZZ_CHECK(a && b > 0);
		break;
	case 5:
		if (!etcd_unpack_keep_alive(data, len, &failure, &a))
			FUZZ_CHECK(a >= 0);
		break;
	}
	return 0;
}
