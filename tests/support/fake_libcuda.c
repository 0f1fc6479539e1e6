/* libcuda.so.1 as far as the memory probe calls it. A device has a context where fake_device() named it. A thread that
   asks for memory in any but the relaxed capture mode would end another thread's graph capture: it gets an error. */
#include <stddef.h>
#include <string.h>

#define DEVICES 8
#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED 900
#define RELAXED 2

static size_t total_bytes[DEVICES], used_bytes[DEVICES];
static int has_context[DEVICES], was_asked[DEVICES];
static int opened;
static __thread int mode, depth, pushed[DEVICES];

void fake_device(int device, size_t total, size_t used) {
  total_bytes[device] = total;
  used_bytes[device] = used;
  has_context[device] = 1;
}
int fake_contexts_opened(void) { return opened; }
int fake_was_asked(int device) { return was_asked[device]; }
int fake_is_sliced;

int cuThreadExchangeStreamCaptureMode(int *asked) {
  int before = mode;
  mode = *asked;
  *asked = before;
  return CUDA_SUCCESS;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return index < DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) {
  memset(uuid, 0xa0 + device, 16);
  return CUDA_SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, (fake_is_sliced ? 0xb0 : 0xa0) + device, 16);
  return CUDA_SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = has_context[device];
  return CUDA_SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  opened += !has_context[device];
  has_context[device] = 1;
  *context = &has_context[device];
  return CUDA_SUCCESS;
}
int cuCtxPushCurrent_v2(void *context) {
  pushed[depth++] = (int)((int *)context - has_context);
  return CUDA_SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
  *context = &has_context[pushed[--depth]];
  return CUDA_SUCCESS;
}
#ifndef OLD_DRIVER /* one that has no such function */
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  if (mode != RELAXED) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  int device = pushed[depth - 1];
  was_asked[device] = 1;
  *total = total_bytes[device];
  *free_bytes = total_bytes[device] - used_bytes[device];
  return CUDA_SUCCESS;
}
#endif
