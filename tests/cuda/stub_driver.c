/* As much of the CUDA driver as `Driver` calls, through cuda.bindings and cuda.core, for machines
 * without one: a libcuda.so.1.
 *
 * It runs nothing: it notes what was launched. The variables `stub_*` are set and read by
 * driver_programs.py. Handles need more than 32 bits, and a parameter is 8 bytes.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { DEVICES = 2, PARAMETERS = 32, LAUNCHES = 1 << 15, LOADS = 64 };

#define HANDLE(kind, number) ((void *)(((uint64_t)(kind) << 40) + 0x100000000 + 8 * (number)))
#define CONTEXT(device) HANDLE(1, device)
#define LIBRARY(load) HANDLE(2, load)
#define KERNEL(load) HANDLE(3, load)

typedef struct {
    void *function, *stream, *context;
    uint32_t grid[3], block[3], shared, unused;
    uint64_t parameters[PARAMETERS];
} Launch;

int stub_version = 13000, stub_devices = 1, stub_capabilities[DEVICES] = {90, 80};
int stub_parameters;                                       /* that a kernel has */
int stub_init_fails, stub_load_fails, stub_launch_fails;   /* with this CUresult */
int stub_loads, stub_retained, stub_asked, stub_launched;  /* asked: to launch */
Launch stub_launches[LAUNCHES];

static __thread void *current;

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : stub_init_fails; }

int cuDriverGetVersion(int *version) { *version = stub_version; return OK; }

int cuGetErrorName(int result, const char **text) {
    *text = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
          : result == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
          : result == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : result == 218 ? "CUDA_ERROR_INVALID_PTX"
          : result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *text ? OK : INVALID_VALUE;
}

int cuGetErrorString(int result, const char **text) {
    *text = result == 700 ? "an illegal memory access was encountered" : "words of the driver";
    return OK;
}

int cuDeviceGetCount(int *count) { *count = stub_devices; return OK; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0 <= ordinal && ordinal < stub_devices ? OK : INVALID_DEVICE;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 16 && attribute != 75 && attribute != 76)
        return INVALID_VALUE;
    *value = attribute == 16   ? 132
             : attribute == 75 ? stub_capabilities[device] / 10 : stub_capabilities[device] % 10;
    return OK;
}

int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device ? "Stub 1" : "Stub 0", size);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    __atomic_add_fetch(&stub_retained, 1, __ATOMIC_SEQ_CST);
    *context = CONTEXT(device);
    return OK;
}

int cuCtxGetCurrent(void **context) { *context = current; return OK; }

int cuCtxSetCurrent(void *context) { current = context; return OK; }

/* Memory is the host's; a thread that may not allocate while others capture is refused. */
static __thread int capture_mode;
int stub_memory_fails, stub_memory_stream;

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (stub_memory_fails)
        return stub_memory_fails;
    if (!current)
        return INVALID_CONTEXT;
    *address = (uint64_t)malloc(bytes);
    return capture_mode == 2 ? OK : INVALID_VALUE;
}

int cuMemsetD32Async(uint32_t *address, unsigned value, size_t count, void *stream) {
    stub_memory_stream = (int)(uint64_t)stream;
    for (size_t k = 0; k < count; k++)
        address[k] = value;
    return current ? OK : INVALID_CONTEXT;
}

int cuLibraryLoadData(void **library, const char *image, void *a, void *b, unsigned options,
                      void *c, void *d, unsigned others) {
    if (stub_load_fails)
        return stub_load_fails;
    int number = __atomic_fetch_add(&stub_loads, 1, __ATOMIC_SEQ_CST);
    *library = LIBRARY(number);
    return OK;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    for (int number = 0; number < stub_loads; number++)
        if (LIBRARY(number) == library) {
            *kernel = KERNEL(number);
            return OK;
        }
    return NOT_FOUND;
}

int cuLaunchKernel(void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                   uint32_t bz, uint32_t shared, void *stream, void **parameters, void **extra) {
    __atomic_add_fetch(&stub_asked, 1, __ATOMIC_SEQ_CST);
    if (stub_launch_fails)
        return stub_launch_fails;
    if (!current)
        return INVALID_CONTEXT;
    int number = 0;
    while (number < stub_loads && KERNEL(number) != function)
        number++;
    if (number == stub_loads)
        return INVALID_HANDLE;
    int index = __atomic_fetch_add(&stub_launched, 1, __ATOMIC_SEQ_CST) % LAUNCHES;
    Launch launch = {function, stream, current, {gx, gy, gz}, {bx, by, bz}, shared, 0, {0}};
    for (int k = 0; k < stub_parameters; k++)
        memcpy(&launch.parameters[k], parameters[k], 8);
    stub_launches[index] = launch;
    return OK;
}

typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream, *attributes;
    uint32_t count;
} Config;

int cuLaunchKernelEx(const Config *c, void *function, void **parameters, void **extra) {
    return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                          c->block[2], c->shared, c->stream, parameters, extra);
}

/* By which cuda.bindings finds all other functions, without the versions in their names. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                        int *status) {
    char name[128];
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(name, sizeof name, "%s_v2", symbol);
    *function = dlsym(library, name);
    if (!*function)
        *function = dlsym(library, symbol);
    if (status)
        *status = !*function;
    return *function ? OK : NOT_FOUND;
}
