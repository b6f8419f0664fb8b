/* An imitation of GDRCopy beside that of the CUDA driver, whose device memory is the host's: a mapping is the memory itself. It checks
 * what the library demands: whole pages of 64 KiB, and copies inside what is mapped. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned long start;
  size_t len;
  int mapped;
} Pin;

static int opened;

void *gdr_open(void) { return &opened; }

int gdr_pin_buffer(void *gdr, unsigned long start, size_t len, uint64_t token, uint32_t space, unsigned long *handle) {
  if (gdr != &opened || start % 65536 || len % 65536 || !len || token || space) return EINVAL;
  Pin *pin = malloc(sizeof *pin);
  *pin = (Pin){start, len, 0};
  *handle = (unsigned long)pin;
  return 0;
}

int gdr_map(void *gdr, unsigned long handle, void **start, size_t len) {
  Pin *pin = (Pin *)handle;
  if (gdr != &opened || len != pin->len) return EINVAL;
  pin->mapped = 1;
  *start = (void *)pin->start;
  return 0;
}

int gdr_copy_to_mapping(unsigned long handle, void *to, const void *from, size_t len) {
  Pin *pin = (Pin *)handle;
  if (!pin->mapped || (unsigned long)to < pin->start || (unsigned long)to + len > pin->start + pin->len) return EINVAL;
  memcpy(to, from, len);
  return 0;
}

int gdr_unmap(void *gdr, unsigned long handle, void *start, size_t len) {
  Pin *pin = (Pin *)handle;
  if (gdr != &opened || !pin->mapped || start != (void *)pin->start || len != pin->len) return EINVAL;
  pin->mapped = 0;
  return 0;
}

int gdr_unpin_buffer(void *gdr, unsigned long handle) {
  Pin *pin = (Pin *)handle;
  if (gdr != &opened || pin->mapped) return EINVAL;
  free(pin);
  return 0;
}
