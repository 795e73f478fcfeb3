/*
 * What bps uses of the stable binary interface between XLA and functions that it calls, which jaxlib brings as
 * xla/ffi/api/c_api.h: structures that a handler is given, and the few functions that it may call. Declared here once
 * more, so that building bps needs no jaxlib; a test compares sizes, offsets and values with the installed header.
 * XLA promises to change no layout without a new major version, and tells how much it knows by struct_size.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The version that is declared here. XLA accepts every older one of its major version that it still supports. */
enum { FFI_MAJOR = 0, FFI_MINOR = 1 };

enum { FFI_EXTENSION_METADATA = 1 };
enum { FFI_BUFFER = 1 };			  /* type of an argument, type of a result */
enum { FFI_ATTR_ARRAY = 1, FFI_ATTR_STRING = 4 }; /* types of an attribute */

enum ffi_error_code {
	FFI_CANCELLED = 1,
	FFI_INVALID_ARGUMENT = 3,
	FFI_DEADLINE_EXCEEDED = 4,
	FFI_RESOURCE_EXHAUSTED = 8,
	FFI_FAILED_PRECONDITION = 9,
	FFI_INTERNAL = 13,
	FFI_UNAVAILABLE = 14,
};

enum ffi_dtype {
	FFI_PRED = 1,
	FFI_S8 = 2,
	FFI_S16 = 3,
	FFI_S32 = 4,
	FFI_S64 = 5,
	FFI_U8 = 6,
	FFI_F16 = 10,
	FFI_F32 = 11,
	FFI_F64 = 12,
	FFI_BF16 = 16,
	FFI_TOKEN = 17,
};

struct ffi_error;  /* XLA's; NULL means that all is well */
struct ffi_future; /* XLA's; a result that comes later */

struct ffi_extension {
	size_t struct_size;
	int type;
	struct ffi_extension *next;
};

struct ffi_version {
	size_t struct_size;
	struct ffi_extension *extension_start;
	int major;
	int minor;
};

struct ffi_metadata {
	size_t struct_size;
	struct ffi_version api_version;
	uint32_t traits;
};

struct ffi_metadata_extension {
	struct ffi_extension base;
	struct ffi_metadata *metadata;
};

struct ffi_span {
	const char *ptr;
	size_t len;
};

struct ffi_array {
	int dtype;
	size_t size;
	void *data;
};

struct ffi_buffer {
	size_t struct_size;
	struct ffi_extension *extension_start;
	int dtype;
	void *data;
	int64_t rank;
	int64_t *dims;
};

struct ffi_error_create {
	size_t struct_size;
	struct ffi_extension *extension_start;
	const char *message;
	int code;
};

struct ffi_future_create {
	size_t struct_size;
	struct ffi_extension *extension_start;
	struct ffi_future *future; /* out */
};

struct ffi_future_set_available {
	size_t struct_size;
	struct ffi_extension *extension_start;
	struct ffi_future *future;
};

struct ffi_future_set_error {
	size_t struct_size;
	struct ffi_extension *extension_start;
	struct ffi_future *future;
	struct ffi_error *error; /* becomes XLA's */
};

/* Functions that bps does not call keep their place. */
struct ffi_api {
	size_t struct_size;
	struct ffi_extension *extension_start;
	struct ffi_version api_version;
	const void *internal_api;
	struct ffi_error *(*error_create)(struct ffi_error_create *args);
	void (*others[12])(void);
	struct ffi_error *(*future_create)(struct ffi_future_create *args);
	struct ffi_error *(*future_set_available)(struct ffi_future_set_available *args);
	struct ffi_error *(*future_set_error)(struct ffi_future_set_error *args);
};

struct ffi_arguments { /* results have the same layout */
	size_t struct_size;
	struct ffi_extension *extension_start;
	int64_t size;
	int *types;
	void **items; /* of type FFI_BUFFER: struct ffi_buffer */
};

struct ffi_attributes {
	size_t struct_size;
	struct ffi_extension *extension_start;
	int64_t size;
	int *types;
	struct ffi_span **names;
	void **items; /* of type FFI_ATTR_ARRAY: struct ffi_array; FFI_ATTR_STRING: struct ffi_span */
};

struct ffi_call_frame {
	size_t struct_size;
	struct ffi_extension *extension_start;
	const struct ffi_api *api;
	void *context;
	int stage;
	struct ffi_arguments arguments;
	struct ffi_arguments results;
	struct ffi_attributes attributes;
	struct ffi_future *future; /* out: the results are there when this is available */
};
