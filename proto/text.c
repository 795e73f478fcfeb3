/*
 * Which characters may be shown, and the reader of UTF-8 that finds them. Callers refuse names by
 * text_is_plain() and clean messages and log lines by text_make_plain().
 */
#include "proto/text.h"

/*
 * Not shown, or shown as something else: controls, formats, directions, separators of lines,
 * surrogates, no characters. In ascending order.
 */
static const struct {
	uint32_t first, last;
} not_plain[] = {
	{ 0x0000, 0x001f },   { 0x007f, 0x009f },   { 0x00ad, 0x00ad },	  { 0x034f, 0x034f },
	{ 0x0600, 0x0605 },   { 0x061c, 0x061c },   { 0x06dd, 0x06dd },	  { 0x070f, 0x070f },
	{ 0x0890, 0x0891 },   { 0x08e2, 0x08e2 },   { 0x115f, 0x1160 },	  { 0x17b4, 0x17b5 },
	{ 0x180b, 0x180f },   { 0x200b, 0x200f },   { 0x2028, 0x202e },	  { 0x2060, 0x206f },
	{ 0x3164, 0x3164 },   { 0xd800, 0xdfff },   { 0xfdd0, 0xfdef },	  { 0xfe00, 0xfe0f },
	{ 0xfeff, 0xfeff },   { 0xffa0, 0xffa0 },   { 0xfff0, 0xfffb },	  { 0xfffe, 0xffff },
	{ 0x110bd, 0x110bd }, { 0x110cd, 0x110cd }, { 0x13430, 0x1345f }, { 0x1bca0, 0x1bca3 },
	{ 0x1d173, 0x1d17a }, { 0xe0000, 0xe0fff },
};

static bool is_plain(uint32_t c)
{
	for (size_t i = 0; i < ARRAY_SIZE(not_plain) && c >= not_plain[i].first; i++)
		if (c <= not_plain[i].last)
			return false;
	/* The last two of each plane are no characters. */
	return c <= 0x10ffff && (c & 0xfffe) != 0xfffe;
}

/* How many bytes the first character has, if it is plain; else 0. */
static size_t plain_len(const unsigned char *text, size_t len)
{
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	size_t n = *text < 0x80		? 1
		   : *text >> 5 == 0x06 ? 2
		   : *text >> 4 == 0x0e ? 3
		   : *text >> 3 == 0x1e ? 4
					: 0;
	uint32_t c = n == 1 ? *text : *text & (0xffu >> (n + 1));

	if (!n || n > len)
		return 0;
	for (size_t i = 1; i < n; i++) {
		if (text[i] >> 6 != 2)
			return 0;
		c = c << 6 | (text[i] & 0x3f);
	}
	return c >= least[n] && is_plain(c) ? n : 0;
}

bool text_is_plain(const char *text, size_t len)
{
	for (size_t at = 0, n; at < len; at += n) {
		n = plain_len((const unsigned char *)text + at, len - at);
		if (!n)
			return false;
	}
	return true;
}

bool text_is_name(const char *text, size_t max)
{
	size_t len = strlen(text);

	return len && len <= max && text_is_plain(text, len);
}

bool text_take_name(const void *text, size_t len, char *ret_name, size_t size)
{
	if (!len || len >= size || !text_is_plain(text, len))
		return false;
	memcpy(ret_name, text, len);
	ret_name[len] = '\0';
	return true;
}

void text_make_plain(char *text, size_t len)
{
	for (size_t at = 0; at < len;) {
		size_t n = plain_len((const unsigned char *)text + at, len - at);

		if (!n)
			text[at] = '?';
		at += n ? n : 1;
	}
}
