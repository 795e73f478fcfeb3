/*
 * What tensorflow_op.c uses of TensorFlow's C API for kernels (tensorflow/c/kernels.h, ops.h, tf_tensor.h, tf_status.h),
 * declared here so that nothing of TensorFlow is needed to build. The functions are looked up in the process that loads
 * us: TensorFlow is there already. They are a stable binary interface since TensorFlow 2.3.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tf_status;
struct tf_tensor;
struct tf_op_builder;
struct tf_shape;
struct tf_shape_context;
struct tf_kernel_builder;
struct tf_construction;
struct tf_context;

/* TF_DataType */
enum {
	TF_FLOAT = 1,
	TF_DOUBLE = 2,
	TF_INT32 = 3,
	TF_UINT8 = 4,
	TF_INT16 = 5,
	TF_INT8 = 6,
	TF_INT64 = 9,
	TF_BOOL = 10,
	TF_BFLOAT16 = 14,
	TF_HALF = 19
};

/* TF_Code */
enum {
	TF_OK = 0,
	TF_CANCELLED = 1,
	TF_INVALID_ARGUMENT = 3,
	TF_DEADLINE_EXCEEDED = 4,
	TF_RESOURCE_EXHAUSTED = 8,
	TF_FAILED_PRECONDITION = 9,
	TF_INTERNAL = 13,
	TF_UNAVAILABLE = 14
};

/* X(result, name without TF_, arguments) */
#define TF_FUNCTIONS(X)                                                                       \
	X(struct tf_status *, NewStatus, (void))                                              \
	X(void, DeleteStatus, (struct tf_status *))                                           \
	X(void, SetStatus, (struct tf_status *, int code, const char *text))                  \
	X(int, GetCode, (const struct tf_status *))                                           \
	X(const char *, Message, (const struct tf_status *))                                  \
	X(struct tf_tensor *, NewTensor,                                                      \
	  (int dtype, const int64_t *dims, int n_dims, void *data, size_t len,                \
	   void (*deallocate)(void *data, size_t len, void *arg), void *arg))                 \
	X(struct tf_tensor *, AllocateTensor,                                                 \
	  (int dtype, const int64_t *dims, int n_dims, size_t len))                           \
	X(void, DeleteTensor, (struct tf_tensor *))                                           \
	X(int, TensorType, (const struct tf_tensor *))                                        \
	X(int, NumDims, (const struct tf_tensor *))                                           \
	X(int64_t, Dim, (const struct tf_tensor *, int i))                                    \
	X(void *, TensorData, (const struct tf_tensor *))                                     \
	X(int64_t, TensorElementCount, (const struct tf_tensor *))                            \
	X(struct tf_op_builder *, NewOpDefinitionBuilder, (const char *name))                 \
	X(void, OpDefinitionBuilderAddAttr, (struct tf_op_builder *, const char *spec))       \
	X(void, OpDefinitionBuilderAddInput, (struct tf_op_builder *, const char *spec))      \
	X(void, OpDefinitionBuilderAddOutput, (struct tf_op_builder *, const char *spec))     \
	X(void, OpDefinitionBuilderSetIsStateful, (struct tf_op_builder *, bool))             \
	X(void, OpDefinitionBuilderSetShapeInferenceFunction,                                 \
	  (struct tf_op_builder *, void (*)(struct tf_shape_context *, struct tf_status *)))  \
	X(void, RegisterOpDefinition, (struct tf_op_builder *, struct tf_status *))           \
	X(struct tf_shape *, ShapeInferenceContextScalar, (struct tf_shape_context *))        \
	X(void, ShapeInferenceContextSetOutput,                                               \
	  (struct tf_shape_context *, int i, struct tf_shape *, struct tf_status *))          \
	X(void, ShapeInferenceContextSetUnknownShape,                                         \
	  (struct tf_shape_context *, struct tf_status *))                                    \
	X(void, DeleteShapeHandle, (struct tf_shape *))                                       \
	X(struct tf_kernel_builder *, NewKernelBuilder,                                       \
	  (const char *op, const char *device, void *(*create)(struct tf_construction *),     \
	   void (*compute)(void *kernel, struct tf_context *), void (*free)(void *kernel)))   \
	X(void, RegisterKernelBuilder,                                                        \
	  (const char *name, struct tf_kernel_builder *, struct tf_status *))                 \
	X(void, OpKernelConstruction_GetAttrSize,                                             \
	  (struct tf_construction *, const char *attr, int32_t *n, int32_t *total,            \
	   struct tf_status *))                                                               \
	X(void, OpKernelConstruction_GetAttrString,                                           \
	  (struct tf_construction *, const char *attr, char *value, size_t len,               \
	   struct tf_status *))                                                               \
	X(void, OpKernelConstruction_GetAttrInt32,                                            \
	  (struct tf_construction *, const char *attr, int32_t *value, struct tf_status *))   \
	X(void, OpKernelConstruction_Failure, (struct tf_construction *, struct tf_status *)) \
	X(void, OpKernelContext_Failure, (struct tf_context *, struct tf_status *))           \
	X(void, GetInput,                                                                     \
	  (struct tf_context *, int i, struct tf_tensor **tensor, struct tf_status *))        \
	X(void, SetOutput,                                                                    \
	  (struct tf_context *, int i, const struct tf_tensor *tensor, struct tf_status *))

struct tf_api {
#define TF_MEMBER(result, name, arguments) result(*name) arguments;
	TF_FUNCTIONS(TF_MEMBER)
#undef TF_MEMBER
};
