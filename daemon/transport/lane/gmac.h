/*
 * AES-128-GMAC (NIST SP 800-38D): tags of messages that come in pieces. By OpenSSL; or by Intel's multi-buffer library for
 * IPsec, where its header was there when this was built and that version of it is there now: with VPCLMULQDQ it takes a third
 * of the time of OpenSSL 3.0. Both make the same tags. Belongs to a seal; its thread.
 */
#pragma once

#include "proto/c.h"

#define GMAC_KEY_LEN   16
#define GMAC_NONCE_LEN 12
#define GMAC_TAG_LEN   16

struct gmac;

/* Implementations, and their names: the first is the fastest here, the last is OpenSSL's. Any thread. */
size_t gmac_n_implementations(void);
const char *gmac_implementation(size_t implementation);

/* Returns 0 or -ENOMEM. */
int gmac_new(size_t implementation, const unsigned char key[GMAC_KEY_LEN], struct gmac **ret_gmac);
/* Returns NULL; takes NULL. */
struct gmac *gmac_free(struct gmac *gmac);
/* These return false when the library fails: then no tag is right from there on. */
bool gmac_begin(struct gmac *gmac, const unsigned char nonce[GMAC_NONCE_LEN]);
bool gmac_add(struct gmac *gmac, const void *data, size_t len);
bool gmac_end(struct gmac *gmac, unsigned char ret_tag[GMAC_TAG_LEN]);
