/* Messages tell their fields themselves (protobuf-c's descriptors), so one function writes them all. */
#include "admin/ctl.h"
#include "proto/admin.pb-c.h"
#include "proto/health.pb-c.h"

#include <jansson.h>

static json_t *json_message(const ProtobufCMessage *message);

/* Names may hold any bytes; JSON may not. */
static json_t *json_text(const char *text)
{
	json_t *json = json_string(text);
	char *copy;

	if (json)
		return json;
	copy = strdup(text);
	for (char *c = copy; c && *c; c++)
		if ((unsigned char)*c >= 0x80)
			*c = '?';
	json = copy ? json_string(copy) : NULL;
	free(copy);
	return json;
}

static json_t *json_roles(uint32_t roles)
{
	static const char *const names[] = { "agent", "server", "coordinator" };
	json_t *list = json_array();

	for (size_t i = 0; list && i < ARRAY_SIZE(names); i++)
		if (roles & 1u << i)
			(void)json_array_append_new(list, json_string(names[i]));
	return list;
}

static json_t *json_id(uint64_t id)
{
	return json_sprintf("%016llx", (unsigned long long)id);
}

/* Times have a fraction. */
static json_t *json_number(const char *text)
{
	return strchr(text, '.') ? json_real(strtod(text, NULL))
				 : json_integer((json_int_t)strtoull(text, NULL, 10));
}

/* "name value" lines; those with # are for people. */
static json_t *json_metrics(const char *text)
{
	json_t *metrics = json_object();
	char *copy = strdup(text), *rest = copy, *line;

	while (metrics && copy && (line = strsep(&rest, "\n"))) {
		char *space = strrchr(line, ' ');

		if (*line == '#' || !space)
			continue;
		*space = 0;
		(void)json_object_set_new(metrics, line, json_number(space + 1));
	}
	free(copy);
	return metrics;
}

static json_t *json_value(const ProtobufCFieldDescriptor *field, const void *value)
{
	switch (field->type) {
	case PROTOBUF_C_TYPE_UINT32:
		if (!strcmp(field->name, "roles"))
			return json_roles(*(const uint32_t *)value);
		return json_integer(*(const uint32_t *)value);
	case PROTOBUF_C_TYPE_UINT64:
		return json_integer((json_int_t)MIN(*(const uint64_t *)value, (uint64_t)INT64_MAX));
	case PROTOBUF_C_TYPE_FIXED64:
		return json_id(*(const uint64_t *)value);
	case PROTOBUF_C_TYPE_BOOL:
		return json_boolean(*(const protobuf_c_boolean *)value);
	case PROTOBUF_C_TYPE_STRING:
		return json_text(*(char *const *)value);
	case PROTOBUF_C_TYPE_MESSAGE:
		return json_message(*(ProtobufCMessage *const *)value);
	default:
		return NULL; /* no answer of ours has another type */
	}
}

static json_t *json_list(const ProtobufCFieldDescriptor *field, const ProtobufCMessage *message)
{
	const char *base = (const char *)message;
	size_t n = *(const size_t *)(base + field->quantifier_offset);
	ProtobufCMessage *const *items = *(ProtobufCMessage *const *const *)(base + field->offset);
	json_t *list = json_array();

	for (size_t i = 0; list && i < n; i++)
		if (json_array_append_new(list, json_value(field, &items[i]))) {
			json_decref(list);
			return NULL;
		}
	return list;
}

static bool field_given(const ProtobufCFieldDescriptor *field, const char *base)
{
	if (field->label == PROTOBUF_C_LABEL_REQUIRED)
		return true;
	if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE)
		return *(void *const *)(base + field->offset);
	return *(const protobuf_c_boolean *)(base + field->quantifier_offset);
}

static json_t *json_message(const ProtobufCMessage *message)
{
	const char *base = (const char *)message;
	json_t *object = json_object();
	int r = object ? 0 : -1;

	for (unsigned i = 0; !r && i < message->descriptor->n_fields; i++) {
		const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];

		if (field->label == PROTOBUF_C_LABEL_REPEATED)
			r = json_object_set_new(object, field->name, json_list(field, message));
		else if (field_given(field, base))
			r = json_object_set_new(object, field->name,
						json_value(field, base + field->offset));
	}
	if (r) {
		json_decref(object);
		return NULL;
	}
	return object;
}

static json_t *json_reply(const ProtobufCMessage *reply)
{
	if (reply->descriptor == &grpc__health__v1__health_check_response__descriptor)
		return json_pack(
			"{s:b}", "serving",
			((const Grpc__Health__V1__HealthCheckResponse *)reply)->status ==
				GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING);
	if (reply->descriptor == &bps__admin__metrics_reply__descriptor)
		return json_metrics(((const Bps__Admin__MetricsReply *)reply)->text);
	return json_message(reply);
}

int ctl_print_json(const ProtobufCMessage *reply)
{
	json_t *json = json_reply(reply);
	int r;

	if (!json)
		return -ENOMEM;
	r = json_dumpf(json, stdout, JSON_INDENT(2));
	(void)fputc('\n', stdout);
	json_decref(json);
	return r ? -EIO : 0;
}
