/* The driver, as far as torch, vLLM's sleep mode and Triton ask for it. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
extern int cudaGetDevice(int *) __attribute__((weak));
extern int cudaSetDevice(int) __attribute__((weak));
extern int cudaGetDeviceCount(int *) __attribute__((weak));
extern int cudaDeviceGetAttribute(int *, int, int) __attribute__((weak));
extern int fakecuda_take(int, size_t) __attribute__((weak));
extern void fakecuda_give(int, size_t) __attribute__((weak));
extern int fakecuda_phys(int) __attribute__((weak));
static int context;
static __thread int active = 1;
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDriverGetVersion(int *v) { char *d = getenv("FAKE_DRIVER"); *v = d ? atoi(d) : 13000; return 0; }
CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return 0; }
CUresult cuDeviceGetCount(int *n) { return cudaGetDeviceCount ? cudaGetDeviceCount(n) : (*n = 1, 0); }
CUresult cuDeviceGetName(char *s, int n, CUdevice d) { snprintf(s, n, "Fake GPU"); return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { return cudaDeviceGetAttribute ? cudaDeviceGetAttribute(v, a, d) : (*v = 1, 0); }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = active ? (CUcontext)&context : NULL; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { active = !!c; return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { return cudaGetDevice ? cudaGetDevice(d) : (*d = 0, 0); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)&context; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) { if (f) *f = 0; *a = 1; return 0; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "fake driver error"; return 0; }
CUresult cuGetErrorName(CUresult e, const char **s) { *s = "FAKE"; return 0; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)v = p; else *(int *)v = 0; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *i) { *m = (CUmodule)&context; return 0; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *i, unsigned n, CUjit_option *o, void **v) { *m = (CUmodule)&context; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)&context; return 0; }
CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *n, CUmodule m, const char *s) { *p = (CUdeviceptr)calloc(1, 4096); if (n) *n = 4096; return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0; return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t m) { *n = 2; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 2; return 0; }
/* Memory in two steps: places of addresses, and memory that is mapped there. */
typedef struct { int file, phys; size_t size; } Made;
static size_t taken[64];
static int owner;
static void __attribute__((destructor)) gone(void) {
    for (int i = 0; i < 64; i++) if (taken[i] && owner == getpid() && fakecuda_give) fakecuda_give(i, taken[i]);
}
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = 2097152; return 0; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t a, CUdeviceptr at, unsigned long long f) {
    char *m = mmap(NULL, n + 2097152, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = ((size_t)m + 2097151) / 2097152 * 2097152;
    return m == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { munmap((void *)p, n); return 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
    int phys = fakecuda_phys ? fakecuda_phys(p->location.id) : 0;
    if (fakecuda_take && fakecuda_take(phys, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    owner = getpid();
    __sync_fetch_and_add(&taken[phys], n);
    Made *m = malloc(sizeof *m);
    *m = (Made){memfd_create("fakecuda", MFD_CLOEXEC), phys, n};
    if (ftruncate(m->file, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    *h = (CUmemGenericAllocationHandle)m;
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) { Made *m = (Made *)h; if (fakecuda_give) fakecuda_give(m->phys, m->size); __sync_fetch_and_sub(&taken[m->phys], m->size); close(m->file); free(m); return 0; }
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t o, CUmemGenericAllocationHandle h, unsigned long long f) {
    return mmap((void *)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, ((Made *)h)->file, o) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) { mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0); return 0; }
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { return 0; }
CUresult cuMemGetInfo_v2(size_t *f, size_t *t) { extern int cudaMemGetInfo(size_t *, size_t *) __attribute__((weak)); return cudaMemGetInfo ? cudaMemGetInfo(f, t) : 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) { return 0; }
CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, CUstream s, void **p, void **x) { return 0; }
static int nothing(void) { return 0; }
#include <dlfcn.h>
CUresult cuGetProcAddress_v2(const char *s, void **f, int v, cuuint64_t g, CUdriverProcAddressQueryResult *r) {
    char name[96];
    static const char *ends[] = {"_v2", "", "_v3"};
    *f = NULL;
    for (int i = 0; i < 3 && !*f; i++) { snprintf(name, sizeof name, "%s%s", s, ends[i]); *f = dlsym(RTLD_DEFAULT, name); }
    if (!*f) *f = (void *)nothing;
    if (r) *r = 0;
    return 0;
}
