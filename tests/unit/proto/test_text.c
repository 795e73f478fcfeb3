/* Characters that may be shown, and those that may not. */
#include "proto/text.h"
#include "test.h"

static const char *const plain[] = {
	"", "layer.0/weight:1", "gradient \xc3\xbc", "\xe5\xb1\x82", "\xd7\xa9", "\xf0\x9f\x8e\x93",
};

static const struct {
	const char *text, *shown;
} others[] = {
	{ "a\nb", "a?b" },	 /* a line of its own */
	{ "\x1b[31m", "?[31m" }, /* a terminal's command */
	{ "\x7f", "?" },
	{ "\xc2\x9b"
	  "31m",
	  "??31m" }, /* U+009B: the same command in one character */
	{ "a\xe2\x80\xae"
	  "b",
	  "a???b" },			/* U+202E: from right to left */
	{ "\xe2\x81\xa6", "???" },	/* U+2066 */
	{ "a\xe2\x80\x8b", "a???" },	/* U+200B: nothing is seen */
	{ "\xef\xbb\xbf", "???" },	/* U+FEFF */
	{ "\xe2\x80\xa8", "???" },	/* U+2028: a line's end */
	{ "\xf3\xa0\x80\x81", "????" }, /* U+E0001 */
	{ "\xff", "?" },		/* no UTF-8 */
	{ "\xc3", "?" },		/* cut off */
	{ "\xc3(", "?(" },
	{ "\xc0\x8a", "??" }, /* a line feed, too long */
	{ "\xe0\x80\x8a", "???" },
	{ "\xed\xa0\x80", "???" },	/* a surrogate */
	{ "\xf4\x90\x80\x80", "????" }, /* beyond the last */
	{ "\xef\xbf\xbf", "???" },
};

TEST(what_may_be_shown)
{
	for (size_t i = 0; i < ARRAY_SIZE(plain); i++) {
		char copy[64];
		size_t len = strlen(plain[i]);

		memcpy(copy, plain[i], len + 1);
		ASSERT_TRUE(text_is_plain(copy, len));
		text_make_plain(copy, len);
		ASSERT_STR(copy, plain[i]);
	}
	ASSERT_TRUE(!text_is_plain("a\0b", 3));
}

TEST(what_may_not)
{
	for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
		char copy[64];
		size_t len = strlen(others[i].text);

		memcpy(copy, others[i].text, len + 1);
		ASSERT_TRUE(!text_is_plain(copy, len));
		text_make_plain(copy, len);
		ASSERT_STR(copy, others[i].shown);
		ASSERT_TRUE(text_is_plain(copy, len));
	}
}
