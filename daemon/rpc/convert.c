/*
 * Between gRPC's terms and ours: byte buffers, status codes, TLS credentials from PEM files, and
 * the library's log. Loop's thread, but for the log.
 */
#include "base/log.h"
#include "rpc/engine.h"

#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/log.h>
#include <sys/stat.h>

#define PEM_MAX \
	(1u     \
	 << 20) /* bytes of a PEM file; a bundle of all public authorities has a quarter of this */

grpc_byte_buffer *rpc_buffer_new(const void *data, size_t len)
{
	grpc_slice slice = len ? grpc_slice_from_copied_buffer(data, len) : grpc_empty_slice();
	grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);

	grpc_slice_unref(slice);
	return buffer;
}

int rpc_buffer_read(grpc_byte_buffer *buffer, void **ret_data, size_t *ret_len)
{
	_cleanup_(freep) char *data = NULL;
	size_t len = grpc_byte_buffer_length(buffer), at = 0;
	grpc_byte_buffer_reader reader;
	grpc_slice slice;

	if (len > RPC_MESSAGE_MAX)
		return error_origin(-EMSGSIZE);
	data = malloc(MAX(len, 1u));
	if (!data)
		return error_origin(-ENOMEM);
	/* Compressed messages have been unpacked by the library's filter, within the same limit. */
	if (!grpc_byte_buffer_reader_init(&reader, buffer))
		return error_origin(-EPROTO);
	while (grpc_byte_buffer_reader_next(&reader, &slice)) {
		size_t n = MIN(GRPC_SLICE_LENGTH(slice), len - at);

		memcpy(data + at, GRPC_SLICE_START_PTR(slice), n);
		at += n;
		grpc_slice_unref(slice);
	}
	grpc_byte_buffer_reader_destroy(&reader);
	*ret_data = TAKE_PTR(data);
	*ret_len = at;
	return 0;
}

/* The first row of a code is what the other end makes of it. */
static const struct {
	int status;
	grpc_status_code code;
} codes[] = {
	{ -ECANCELED, GRPC_STATUS_CANCELLED },
	{ -EIO, GRPC_STATUS_UNKNOWN },
	{ -EINVAL, GRPC_STATUS_INVALID_ARGUMENT },
	{ -ETIMEDOUT, GRPC_STATUS_DEADLINE_EXCEEDED },
	{ -ENOENT, GRPC_STATUS_NOT_FOUND },
	{ -EEXIST, GRPC_STATUS_ALREADY_EXISTS },
	{ -EACCES, GRPC_STATUS_PERMISSION_DENIED },
	{ -EPERM, GRPC_STATUS_PERMISSION_DENIED },
	{ -ENOBUFS, GRPC_STATUS_RESOURCE_EXHAUSTED },
	{ -ENOMEM, GRPC_STATUS_RESOURCE_EXHAUSTED },
	{ -EMSGSIZE, GRPC_STATUS_RESOURCE_EXHAUSTED },
	{ -EBUSY, GRPC_STATUS_FAILED_PRECONDITION },
	{ -EAGAIN, GRPC_STATUS_ABORTED },
	{ -ERANGE, GRPC_STATUS_OUT_OF_RANGE },
	{ -ENOSYS, GRPC_STATUS_UNIMPLEMENTED },
	{ -EOPNOTSUPP, GRPC_STATUS_UNIMPLEMENTED },
	{ -EPROTO, GRPC_STATUS_INTERNAL },
	{ -ECONNREFUSED, GRPC_STATUS_UNAVAILABLE },
	{ -ECONNRESET, GRPC_STATUS_UNAVAILABLE },
	{ -ESHUTDOWN, GRPC_STATUS_UNAVAILABLE },
	{ -EBADMSG, GRPC_STATUS_DATA_LOSS },
	{ -EKEYREJECTED, GRPC_STATUS_UNAUTHENTICATED },
};

grpc_status_code rpc_code_of_errno(int status)
{
	for (size_t i = 0; i < ARRAY_SIZE(codes); i++)
		if (codes[i].status == status)
			return codes[i].code;
	return GRPC_STATUS_UNKNOWN;
}

int rpc_errno_of_code(grpc_status_code code)
{
	for (size_t i = 0; i < ARRAY_SIZE(codes); i++)
		if (codes[i].code == code)
			return codes[i].status;
	return -EIO;
}

static int read_pem(const char *path, const char *what, struct failure *failure, char **ret_text)
{
	_cleanup_(freep) char *text = NULL;
	_cleanup_(fd_closep) int fd = -1;
	struct stat st;
	ssize_t n;

	if (!path || !*path)
		return failure_set(
			failure, -EINVAL,
			"%s: not set; mutual TLS needs an authority, a certificate and a key",
			what);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &st))
		return failure_set(failure, -errno, "%s %s: %s", what, path, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_size > PEM_MAX)
		return failure_set(failure, -EINVAL, "%s %s: not a PEM file", what, path);
	text = calloc(1, (size_t)st.st_size + 1);
	if (!text)
		return failure_set(failure, -ENOMEM, "%s %s: out of memory", what, path);
	n = read(fd, text, (size_t)st.st_size);
	if (n < 0)
		return failure_set(failure, -errno, "%s %s: %s", what, path, strerror(errno));
	text[n] = 0;
	if (!strstr(text, "-----BEGIN "))
		return failure_set(failure, -EINVAL, "%s %s: not a PEM file", what, path);
	*ret_text = TAKE_PTR(text);
	return 0;
}

struct pem {
	char *ca, *cert, *key;
};

static void pem_done(struct pem *pem)
{
	free(pem->ca);
	free(pem->cert);
	if (pem->key)
		explicit_bzero(pem->key, strlen(pem->key));
	free(pem->key);
}

static int pem_read(const struct rpc_tls *tls, struct failure *failure, struct pem *pem)
{
	int r;

	r = read_pem(tls->ca, "TLS authority", failure, &pem->ca);
	if (!r)
		r = read_pem(tls->cert, "TLS certificate", failure, &pem->cert);
	if (!r)
		r = read_pem(tls->key, "TLS key", failure, &pem->key);
	return error_trace(r);
}

int rpc_credentials_of_server(const struct rpc_tls *tls, struct failure *failure,
			      grpc_server_credentials **ret_creds)
{
	_cleanup_(pem_done) struct pem pem = { 0 };
	grpc_ssl_pem_key_cert_pair pair;
	grpc_server_credentials *creds;
	int r;

	r = pem_read(tls, failure, &pem);
	if (r)
		return error_trace(r);
	pair = (grpc_ssl_pem_key_cert_pair){ .private_key = pem.key, .cert_chain = pem.cert };
	creds = grpc_ssl_server_credentials_create_ex(
		pem.ca, &pair, 1, GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, NULL);
	if (!creds)
		return failure_set(failure, -EINVAL, "TLS: certificate %s or key %s is unusable",
				   tls->cert, tls->key);
	*ret_creds = creds;
	return 0;
}

int rpc_credentials_of_channel(const struct rpc_tls *tls, struct failure *failure,
			       grpc_channel_credentials **ret_creds)
{
	_cleanup_(pem_done) struct pem pem = { 0 };
	grpc_ssl_pem_key_cert_pair pair;
	grpc_channel_credentials *creds;
	int r;

	if (!tls) {
		*ret_creds = grpc_insecure_credentials_create();
		return 0;
	}
	r = pem_read(tls, failure, &pem);
	if (r)
		return error_trace(r);
	pair = (grpc_ssl_pem_key_cert_pair){ .private_key = pem.key, .cert_chain = pem.cert };
	creds = grpc_ssl_credentials_create(pem.ca, &pair, NULL, NULL);
	if (!creds)
		return failure_set(failure, -EINVAL, "TLS: certificate %s or key %s is unusable",
				   tls->cert, tls->key);
	*ret_creds = creds;
	return 0;
}

/*
 * Any thread. Errors alone: refused handshakes are among them, with the reason that the refused
 * side is not told. They are a notice to us, as gRPC goes on after each.
 */
static void on_log(gpr_log_func_args *args)
{
	const char *slash = strrchr(args->file, '/');

	log_notice("grpc: %s (%s:%d)", args->message, slash ? slash + 1 : args->file, args->line);
}

void rpc_library_prepare(void)
{
	/*
	 * Names are looked up as all other programs here do, by the C library: what gRPC brings
	 * along instead (c-ares) reads no nsswitch.conf, and leaks. There is no other way to say
	 * so; who has set it otherwise is obeyed.
	 */
	(void)setenv("GRPC_DNS_RESOLVER", "native", 0);
	gpr_set_log_function(on_log);
	gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
}
