/* NVML: the GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says. FAKE_NO_NVML: it cannot be used. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static long all(void) { char *g = getenv("FAKE_GPUS"); return g ? atoi(g) : 2; }
static unsigned long long total(void) { char *g = getenv("FAKE_GIB"); return 1073741824.0 * (g ? atof(g) : 80); }
static unsigned long long used(size_t gpu) { /* by the ledger */
    char *path = getenv("FAKE_LEDGER");
    FILE *file = fopen(path ? path : "/dev/shm/fake-cuda-ledger", "r");
    long bytes = 0;
    if (file) { fseek(file, gpu * sizeof bytes, SEEK_SET); fread(&bytes, sizeof bytes, 1, file); fclose(file); }
    return bytes;
}
int nvmlInit_v2(void) { return getenv("FAKE_NO_NVML") ? 9 : 0; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned f) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return "fake NVML"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = all(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i >= all()) return 2; *h = (void *)(size_t)(i + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **h) { *h = (void *)(size_t)(strtol(u + strlen(u) - 2, NULL, 16) + 1); return 0; }
int nvmlDeviceGetIndex(void *h, unsigned *i) { *i = (size_t)h - 1; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "Fake GPU"); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { snprintf(s, n, "GPU-00000000-0000-0000-0000-0000000000%02x", (int)(size_t)h - 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = total(); m[2] = used((size_t)h - 1); m[1] = m[0] - m[2]; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.00"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { char *d = getenv("FAKE_DRIVER"); *v = d ? atoi(d) : 13000; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *a, unsigned *b) { *a = *b = 0; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *s) { *s = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *p) { *n = 0; return 0; }
int nvmlDeviceGetPersistenceMode(void *h, int *m) { *m = 1; return 0; }
/* What torch looks up before the first of its segments that grow. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) { *h = (void *)(size_t)strtol(strchr(id, ':') + 1, NULL, 16); return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *p) { *n = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *t) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, void *p) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void *h, void *info) { memset((char *)info + 4, 0, 28); return 0; } /* it has none */
