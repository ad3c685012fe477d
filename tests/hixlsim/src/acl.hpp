// The part of ACL that a caller of HIXL needs, and that the simulated HIXL itself uses.
#pragma once

#include <cstddef>
#include <cstdint>

#define HIXLSIM_API __attribute__((visibility("default")))

namespace acl {

constexpr int OK = 0;
constexpr int PARAM_INVALID = 107000;
constexpr int INVALID_DEVICE = 107001;
constexpr int CONTEXT_NULL = 107002;
constexpr int MEMORY_ALLOCATION = 207001;

}  // namespace acl

extern "C" {

HIXLSIM_API int aclInit(const char *config);
HIXLSIM_API int aclFinalize();
HIXLSIM_API int aclrtSetDevice(int32_t device);
HIXLSIM_API int aclrtResetDevice(int32_t device);
HIXLSIM_API int aclrtGetDevice(int32_t *device);
HIXLSIM_API int aclrtGetDeviceCount(uint32_t *count);
HIXLSIM_API int aclrtCreateContext(void **context, int32_t device);
HIXLSIM_API int aclrtDestroyContext(void *context);
HIXLSIM_API int aclrtGetCurrentContext(void **context);
HIXLSIM_API int aclrtSetCurrentContext(void *context);
HIXLSIM_API int aclrtMalloc(void **memory, size_t size, int policy);
HIXLSIM_API int aclrtFree(void *memory);
HIXLSIM_API int aclrtMallocHost(void **memory, size_t size);
HIXLSIM_API int aclrtFreeHost(void *memory);
HIXLSIM_API int aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind);
HIXLSIM_API const char *aclrtGetSocName();

// Not ACL's. Is the address inside memory of aclrtMalloc (2), of aclrtMallocHost (1), or of neither (0)?
HIXLSIM_API int hixlsim_memory_kind(const void *address);
// Not ACL's. False for a context that was destroyed, as a thread has that only borrowed HIXL's own.
HIXLSIM_API int hixlsim_context_lives(void *context);

}
