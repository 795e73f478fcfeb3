/*
 * The text of a thread's last error, which bps_error() returns and every failing function of the
 * library sets. Also copies a caller's struct, which may be of an older or newer bps.h.
 */
#include "client/common/error.h"
#include "client/bps.h"
#include "proto/types.h"
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char error_text[ERROR_TEXT_MAX + 1];

_public_ const char *bps_error(void)
{
	return error_text;
}

int error_set(int error, const char *format, ...)
{
	va_list args;

	/*
	 * One that says the same each time, as that of a full ring, which a trainer may meet
	 * thousands of times in a step.
	 */
	if (!strchr(format, '%')) {
		(void)stpncpy(error_text, format, ERROR_TEXT_MAX);
		return error;
	}
	/* An argument may be the text itself, when it is passed on with more words. */
	char text[sizeof(error_text)];
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	memcpy(error_text, text, sizeof(text));
	return error;
}

int error_copy_params(void *to, size_t to_size, const void *from, const char *name)
{
	size_t size;

	memcpy(&size, from, sizeof(size));
	if (size < sizeof(size))
		return error_set(-EINVAL, "%s.size is %zu: set it to sizeof(struct %s)", name, size,
				 name);

	for (size_t i = to_size; i < size; i++)
		if (((const char *)from)[i])
			return error_set(-EINVAL,
					 "struct %s has a field that libbps_client " BPS_VERSION
					 " does not know: it is of a newer bps.h",
					 name);

	if (size < to_size)
		memset(to, 0, to_size);
	memcpy(to, from, MIN(size, to_size));
	return 0;
}
