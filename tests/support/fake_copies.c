/* libcuda.so.1 as far as trainers/host_bandwidth.py calls it: FAKE_DEVICES devices. A copy works only on memory, and on
   a stream, of the current context's device; whatever FAKE_FAILS names fails. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define INVALID_CONTEXT 201

static __thread int current;

static int fails(const char *name) {
  const char *named = getenv("FAKE_FAILS");
  return named && !strcmp(named, name) ? OUT_OF_MEMORY : 0;
}
int cuInit(unsigned flags) { return flags ? INVALID_VALUE : fails("cuInit"); }
int cuDeviceGetCount(int *count) {
  *count = atoi(getenv("FAKE_DEVICES"));
  return 0;
}
int cuGetErrorName(int code, const char **name) {
  *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_CONTEXT";
  return 0;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(long)(device + 1);
  return 0;
}
int cuCtxSetCurrent(void *context) {
  current = (int)(long)context;
  return 0;
}
/* An address has its device in the upper half. */
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
  *address = (unsigned long long)current << 32;
  return bytes ? fails("cuMemAlloc_v2") : INVALID_VALUE;
}
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = malloc(bytes);
  return flags == 1 ? fails("cuMemHostAlloc") : INVALID_VALUE;
}
int cuStreamCreate(void **stream, unsigned flags) {
  *stream = (void *)(long)current;
  return flags == 1 ? 0 : INVALID_VALUE;
}
static int copied(unsigned long long near, void *far, size_t bytes, void *stream) {
  memset(far, 1, bytes);
  return (near >> 32) == (unsigned)current && (long)stream == current ? 0 : INVALID_CONTEXT;
}
int cuMemcpyHtoDAsync_v2(unsigned long long near, void *far, size_t bytes, void *stream) {
  int failed = fails("cuMemcpyHtoDAsync_v2");
  return failed ? failed : copied(near, far, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *far, unsigned long long near, size_t bytes, void *stream) {
  return copied(near, far, bytes, stream);
}
int cuStreamSynchronize(void *stream) {
  usleep(100);
  return (long)stream == current ? 0 : INVALID_CONTEXT;
}
