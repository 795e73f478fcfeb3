/*
 * Seals of one direction of a connection, by base/crc32c.h or OpenSSL. send.c makes them, receive.c
 * compares them.
 */
#include "transport/lane/seal.h"

#include "base/crc32c.h"
#include "base/error.h"
#include <endian.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>

#define NONCE_LEN 12 /* of GCM: zeros, and the number in the last eight, little-endian */

static_assert(SEAL_MAX >= DATA_CHECK_LEN, "either fits");

int seal_init(struct seal *seal, const unsigned char *key)
{
	*seal = (struct seal){ .len = key ? DATA_TAG_LEN : DATA_CHECK_LEN };
	if (!key)
		return 0;
	seal->cipher = EVP_CIPHER_CTX_new();
	if (!seal->cipher ||
	    !EVP_EncryptInit_ex(seal->cipher, EVP_aes_128_gcm(), NULL, key, NULL)) {
		seal_done(seal);
		return error_origin(-ENOMEM);
	}
	return 0;
}

void seal_done(struct seal *seal)
{
	EVP_CIPHER_CTX_free(seal->cipher);
	seal->cipher = NULL;
}

void seal_begin(struct seal *seal)
{
	unsigned char nonce[NONCE_LEN] = { 0 };
	uint64_t number = htole64(seal->number++);

	seal->crc = 0;
	if (!seal->cipher)
		return;
	memcpy(nonce + NONCE_LEN - sizeof(number), &number, sizeof(number));
	if (!EVP_EncryptInit_ex(seal->cipher, NULL, NULL, NULL, nonce))
		seal->is_broken = true;
}

void seal_add(struct seal *seal, const void *data, size_t len)
{
	int n;

	assert(len <= INT_MAX);
	if (!seal->cipher)
		seal->crc = crc32c(seal->crc, data, len);
	else if (len && !EVP_EncryptUpdate(seal->cipher, NULL, &n, data, (int)len))
		seal->is_broken = true;
}

void seal_end(struct seal *seal, unsigned char *ret_tag)
{
	uint32_t check = htole32(seal->crc);
	unsigned char rest[1];
	int n;

	if (!seal->cipher)
		memcpy(ret_tag, &check, sizeof(check));
	else if (!EVP_EncryptFinal_ex(seal->cipher, rest, &n) ||
		 !EVP_CIPHER_CTX_ctrl(seal->cipher, EVP_CTRL_AEAD_GET_TAG, DATA_TAG_LEN, ret_tag))
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
