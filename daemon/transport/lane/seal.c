/*
 * Seals of one direction of a connection, by base/crc32c.h or gmac.h. send.c makes them, of what
 * delivery.c knows already where several get the same; receive.c compares them.
 */
#include "transport/lane/seal.h"

#include "base/crc32c.h"
#include "base/error.h"
#include "transport/lane/gmac.h"
#include <endian.h>
#include <openssl/crypto.h>

static_assert(SEAL_MAX >= DATA_CHECK_LEN, "either fits");
static_assert(DATA_PACKED_MAX <= CRC32C_JOIN_MAX, "what goes into a pack may be joined");
static_assert(DATA_TAG_LEN == GMAC_TAG_LEN && DATA_PROOF_LEN >= GMAC_KEY_LEN, "as GMAC has them");

int seal_init(struct seal *seal, const unsigned char *key)
{
	*seal = (struct seal){ .len = key ? DATA_TAG_LEN : DATA_CHECK_LEN };
	return key ? error_trace(gmac_new(0, key, &seal->gmac)) : 0;
}

void seal_done(struct seal *seal)
{
	seal->gmac = gmac_free(seal->gmac);
}

void seal_begin(struct seal *seal)
{
	/* Zeros, and the number in the last eight bytes, little-endian. */
	unsigned char nonce[GMAC_NONCE_LEN] = { 0 };
	uint64_t number = htole64(seal->number++);

	seal->crc = 0;
	if (!seal->gmac)
		return;
	memcpy(nonce + GMAC_NONCE_LEN - sizeof(number), &number, sizeof(number));
	if (!gmac_begin(seal->gmac, nonce))
		seal->is_broken = true;
}

void seal_add(struct seal *seal, const void *data, size_t len)
{
	if (!seal->gmac)
		seal->crc = crc32c(seal->crc, data, len);
	else if (!gmac_add(seal->gmac, data, len))
		seal->is_broken = true;
}

void seal_join(struct seal *seal, uint32_t crc, size_t len)
{
	seal->crc = crc32c_join(seal->crc, crc, len);
}

void seal_end(struct seal *seal, unsigned char *ret_tag)
{
	uint32_t check = htole32(seal->crc);

	if (!seal->gmac)
		memcpy(ret_tag, &check, sizeof(check));
	else if (!gmac_end(seal->gmac, ret_tag))
		seal->is_broken = true;
}

bool seal_fits(struct seal *seal, const unsigned char *tag)
{
	unsigned char right[SEAL_MAX] = { 0 };

	seal_end(seal, right);
	return !seal->is_broken && CRYPTO_memcmp(right, tag, seal->len) == 0;
}

void seal_make(struct seal *seal, const void *data, size_t len, unsigned char *ret_tag)
{
	seal_begin(seal);
	seal_add(seal, data, len);
	seal_end(seal, ret_tag);
}
