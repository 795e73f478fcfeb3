/*
 * Text from outside: names that trainers and peers give, and what they say. The one rule of what may be shown: UTF-8 of
 * printable characters. What drives a terminal, forges a line, is not seen or turns the direction of what is beside it is
 * refused in names, and shown as '?' everywhere else. Any thread.
 */
#pragma once

#include "proto/c.h"

/* Whether all of a text may be shown. */
bool text_is_plain(const char *text, size_t len);
/* Whether a name is of 1 to max bytes, all of which may be shown. */
bool text_is_name(const char *text, size_t max);
/* Copies a name from outside to size bytes, and ends it. Returns false when the name is empty, too long, or may not be shown. */
bool text_take_name(const void *text, size_t len, char *ret_name, size_t size);
/* Puts '?' in the place of each byte that may not be shown. */
void text_make_plain(char *text, size_t len);
