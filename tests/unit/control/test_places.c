/* Whose a page is, of many buffers that lie side by side. */
#include "control/places.h"
#include "test.h"

enum { N = 500, PAGE = 4096 };

static char *const start = (char *)(uintptr_t)(1 << 20);

/* Buffer i has i % 5 + 1 pages, and a page that is nobody's before it. */
static void buffers_new(struct buffer *buffers)
{
	char *at = start;

	for (unsigned i = 0; i < N; i++) {
		buffers[i] = (struct buffer){ .data = at + PAGE, .len = (i % 5 + 1) * PAGE };
		at = buffers[i].data + buffers[i].len;
	}
}

static void check(const struct places *places, struct buffer *buffer, bool is_there)
{
	struct buffer *expected = is_there ? buffer : NULL;

	ASSERT_TRUE(!places_find(places, buffer->data - PAGE));
	for (uint64_t at = 0; at < buffer->len; at += PAGE)
		ASSERT_TRUE(places_find(places, buffer->data + at) == expected);
	ASSERT_TRUE(places_find(places, buffer->data + buffer->len - 1) == expected);
}

TEST(each_page_is_of_its_buffer)
{
	static struct buffer buffers[N];
	struct places places = { 0 };

	buffers_new(buffers);
	/* In some order: 7 and 500 have no divisor in common. */
	for (unsigned i = 0; i < N; i++)
		ASSERT_OK(places_add(&places, &buffers[i * 7 % N]));
	for (unsigned i = 0; i < N; i++)
		check(&places, &buffers[i], true);
	ASSERT_TRUE(!places_find(&places, buffers[N - 1].data + buffers[N - 1].len));
	for (unsigned i = 0; i < N; i += 2)
		places_remove(&places, &buffers[i]);
	for (unsigned i = 0; i < N; i++)
		check(&places, &buffers[i], i % 2);
	/* Another may be mapped there now. */
	ASSERT_OK(places_add(&places, &buffers[0]));
	check(&places, &buffers[0], true);
	for (unsigned i = 0; i < N; i++)
		places_remove(&places, &buffers[i]);
	ASSERT_TRUE(!places.root);
}
