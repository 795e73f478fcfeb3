/* Tags of GMAC against NIST's, and each implementation against OpenSSL's, over messages in all kinds of pieces. */
#include "test.h"
#include "transport/lane/gmac.h"
#include <stdlib.h>

static void tag_of(struct gmac *gmac, const unsigned char *nonce, const unsigned char *data,
		   size_t len, size_t piece, unsigned char *ret_tag)
{
	ASSERT_TRUE(gmac_begin(gmac, nonce));
	for (size_t at = 0; at < len; at += MIN(piece, len - at))
		ASSERT_TRUE(gmac_add(gmac, data + at, MIN(piece, len - at)));
	ASSERT_TRUE(gmac_add(gmac, data, 0));
	ASSERT_TRUE(gmac_end(gmac, ret_tag));
}

static void from_hex(const char *hex, unsigned char *ret)
{
	for (; *hex; hex += 2)
		*ret++ = (unsigned char)strtoul((char[]){ hex[0], hex[1], 0 }, NULL, 16);
}

/* GCMVS, gcmEncryptExtIV128: PTlen 0, AADlen 0 and 128. */
TEST(vectors)
{
	static const struct {
		const char *key, *nonce, *data, *tag;
	} vectors[] = {
		{ "11754cd72aec309bf52f7687212e8957", "3c819d9a9bed087615030b65", "",
		  "250327c674aaf477aef2675748cf6971" },
		{ "77be63708971c4e240d1cb79e8d77feb", "e0e00f19fed7ba0136a797f3",
		  "7a43ec1d9c0a5a78a0b16533a6213cab", "209fcc8d3675ed938e9c7166709dd946" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(vectors); i++)
		for (size_t implementation = 0; implementation < gmac_n_implementations();
		     implementation++) {
			unsigned char key[GMAC_KEY_LEN], nonce[GMAC_NONCE_LEN], data[16];
			unsigned char right[GMAC_TAG_LEN], tag[GMAC_TAG_LEN];
			struct gmac *gmac;

			from_hex(vectors[i].key, key);
			from_hex(vectors[i].nonce, nonce);
			from_hex(vectors[i].data, data);
			from_hex(vectors[i].tag, right);
			ASSERT_OK(gmac_new(implementation, key, &gmac));
			tag_of(gmac, nonce, data, strlen(vectors[i].data) / 2, 16, tag);
			ASSERT_TRUE(!memcmp(tag, right, sizeof(tag)));
			(void)gmac_free(gmac);
		}
}

TEST(all_implementations_make_the_same_tags)
{
	enum { MAX = 70000, N = 300 };
	unsigned char *data = malloc(MAX + 64), key[GMAC_KEY_LEN], nonce[GMAC_NONCE_LEN] = { 0 };
	size_t last = gmac_n_implementations() - 1;
	struct gmac *gmacs[2];
	uint32_t state = 1;

	ASSERT_TRUE(data);
	for (size_t i = 0; i < MAX + 64; i++)
		data[i] = (unsigned char)((state = state * 1664525 + 1013904223) >> 24);
	memcpy(key, data, sizeof(key));
	ASSERT_STR(gmac_implementation(last), "OpenSSL");
	ASSERT_OK(gmac_new(0, key, &gmacs[0]));
	ASSERT_OK(gmac_new(last, key, &gmacs[1]));
	for (unsigned i = 0; i < N; i++) {
		size_t len = (state = state * 1664525 + 1013904223) >> 8;
		size_t piece = 1 + (state = state * 1664525 + 1013904223) % 5000;
		const unsigned char *from = data + i % 64;
		unsigned char tags[2][GMAC_TAG_LEN], other[GMAC_TAG_LEN];

		len %= i % 3 ? MAX : 100;
		nonce[GMAC_NONCE_LEN - 1] = (unsigned char)i;
		tag_of(gmacs[0], nonce, from, len, piece, tags[0]);
		tag_of(gmacs[1], nonce, from, len, MAX, tags[1]);
		ASSERT_TRUE(!memcmp(tags[0], tags[1], GMAC_TAG_LEN));
		/* Of another message, another. */
		tag_of(gmacs[0], nonce, from, len + 1, piece, other);
		ASSERT_TRUE(memcmp(other, tags[0], GMAC_TAG_LEN));
	}
	(void)gmac_free(gmacs[0]);
	(void)gmac_free(gmacs[1]);
	free(data);
}
