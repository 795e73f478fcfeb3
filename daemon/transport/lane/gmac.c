/*
 * Tags by one of two libraries, of which the faster is opened once for the process, by whoever
 * first asks. seal.c makes and compares tags here.
 */
#include "transport/lane/gmac.h"

#include "base/error.h"
#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdlib.h>
#if HAVE_IPSEC_MB
#include <dlfcn.h>
#include <intel-ipsec-mb.h>
#include <pthread.h>
#endif

#define GMAC_ALIGN 64 /* of what the faster library keeps of a key */

struct gmac_ops {
	const char *name;
	bool (*key)(struct gmac *gmac, const unsigned char *key);
	bool (*begin)(struct gmac *gmac, const unsigned char *nonce);
	bool (*add)(struct gmac *gmac, const void *data, size_t len);
	bool (*end)(struct gmac *gmac, unsigned char *ret_tag);
};

struct gmac {
#if HAVE_IPSEC_MB
	struct gcm_key_data key;
	struct gcm_context_data context;
#endif
	EVP_CIPHER_CTX *cipher; /* OpenSSL's, or NULL */
	const struct gmac_ops *ops;
};

/* -- OpenSSL ------------------------------------------------------------------------------------------------------ */

static bool openssl_key(struct gmac *gmac, const unsigned char *key)
{
	gmac->cipher = EVP_CIPHER_CTX_new();
	return gmac->cipher && EVP_EncryptInit_ex(gmac->cipher, EVP_aes_128_gcm(), NULL, key, NULL);
}

static bool openssl_begin(struct gmac *gmac, const unsigned char *nonce)
{
	return EVP_EncryptInit_ex(gmac->cipher, NULL, NULL, NULL, nonce);
}

static bool openssl_add(struct gmac *gmac, const void *data, size_t len)
{
	int n;

	assert(len <= INT_MAX);
	return EVP_EncryptUpdate(gmac->cipher, NULL, &n, data, (int)len);
}

static bool openssl_end(struct gmac *gmac, unsigned char *ret_tag)
{
	unsigned char rest[1];
	int n;

	return EVP_EncryptFinal_ex(gmac->cipher, rest, &n) &&
	       EVP_CIPHER_CTX_ctrl(gmac->cipher, EVP_CTRL_AEAD_GET_TAG, GMAC_TAG_LEN, ret_tag);
}

static const struct gmac_ops openssl = {
	.name = "OpenSSL",
	.key = openssl_key,
	.begin = openssl_begin,
	.add = openssl_add,
	.end = openssl_end,
};

/* -- Intel's library ---------------------------------------------------------------------------------------------- */

#if HAVE_IPSEC_MB
#define IPSEC_LIBRARY "libIPSec_MB.so.1"

static IMB_MGR *ipsec_functions; /* NULL: not there. As long as the process */

/* Its functions are members of a structure, which another version may have differently. */
static void ipsec_open(void)
{
	void *library = dlopen(IPSEC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
	unsigned (*version)(void);
	IMB_MGR *(*allocate)(uint64_t flags);
	void (*choose)(IMB_MGR * functions, IMB_ARCH * ret_arch);
	IMB_ARCH arch = IMB_ARCH_NONE;
	IMB_MGR *functions;

	if (!library)
		return;
	*(void **)&version = dlsym(library, "imb_get_version");
	*(void **)&allocate = dlsym(library, "alloc_mb_mgr");
	*(void **)&choose = dlsym(library, "init_mb_mgr_auto");
	if (!version || !allocate || !choose || version() != IMB_VERSION_NUM)
		return;
	functions = allocate(0);
	if (functions)
		choose(functions, &arch);
	if (arch != IMB_ARCH_NONE)
		ipsec_functions = functions;
}

static bool ipsec_key(struct gmac *gmac, const unsigned char *key)
{
	IMB_AES128_GCM_PRE(ipsec_functions, key, &gmac->key);
	return true;
}

static bool ipsec_begin(struct gmac *gmac, const unsigned char *nonce)
{
	IMB_AES128_GMAC_INIT(ipsec_functions, &gmac->key, &gmac->context, nonce, GMAC_NONCE_LEN);
	return true;
}

static bool ipsec_add(struct gmac *gmac, const void *data, size_t len)
{
	IMB_AES128_GMAC_UPDATE(ipsec_functions, &gmac->key, &gmac->context, data, len);
	return true;
}

static bool ipsec_end(struct gmac *gmac, unsigned char *ret_tag)
{
	IMB_AES128_GMAC_FINALIZE(ipsec_functions, &gmac->key, &gmac->context, ret_tag,
				 GMAC_TAG_LEN);
	return true;
}

static const struct gmac_ops ipsec = {
	.name = "libIPSec_MB",
	.key = ipsec_key,
	.begin = ipsec_begin,
	.add = ipsec_add,
	.end = ipsec_end,
};

static const struct gmac_ops *fastest(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	(void)pthread_once(&once, ipsec_open);
	return ipsec_functions ? &ipsec : &openssl;
}
#else
static const struct gmac_ops *fastest(void)
{
	return &openssl;
}
#endif

/* -- Either ------------------------------------------------------------------------------------------------------- */

static const struct gmac_ops *ops_of(size_t implementation)
{
	return implementation ? &openssl : fastest();
}

size_t gmac_n_implementations(void)
{
	return fastest() == &openssl ? 1 : 2;
}

const char *gmac_implementation(size_t implementation)
{
	return ops_of(implementation)->name;
}

int gmac_new(size_t implementation, const unsigned char key[GMAC_KEY_LEN], struct gmac **ret_gmac)
{
	struct gmac *gmac = aligned_alloc(GMAC_ALIGN, align_up(sizeof(*gmac), GMAC_ALIGN));

	if (!gmac)
		return error_origin(-ENOMEM);
	memset(gmac, 0, sizeof(*gmac));
	gmac->ops = ops_of(implementation);
	if (!gmac->ops->key(gmac, key)) {
		(void)gmac_free(gmac);
		return error_origin(-ENOMEM);
	}
	*ret_gmac = gmac;
	return 0;
}

struct gmac *gmac_free(struct gmac *gmac)
{
	if (!gmac)
		return NULL;
	EVP_CIPHER_CTX_free(gmac->cipher);
	OPENSSL_cleanse(gmac, sizeof(*gmac));
	free(gmac);
	return NULL;
}

bool gmac_begin(struct gmac *gmac, const unsigned char nonce[GMAC_NONCE_LEN])
{
	return gmac->ops->begin(gmac, nonce);
}

bool gmac_add(struct gmac *gmac, const void *data, size_t len)
{
	return !len || gmac->ops->add(gmac, data, len);
}

bool gmac_end(struct gmac *gmac, unsigned char ret_tag[GMAC_TAG_LEN])
{
	return gmac->ops->end(gmac, ret_tag);
}
