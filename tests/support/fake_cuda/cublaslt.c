/* cuBLASLt: one way to multiply, of the sizes that torch reads. */
#include <string.h>
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int asked, char *results, int *found) { memset(results, 0, 96); *found = 1; return 0; }
