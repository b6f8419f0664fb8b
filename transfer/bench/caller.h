/* Declarations that the C callers of these benchmarks share. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "putget_transfer.h"

/* Ends the program where a call fails, and says which and why. */
#define OK(call)                                           \
  do {                                                     \
    if ((call) != PT_OK) {                                 \
      fprintf(stderr, "%s: %s\n", #call, pt_last_error()); \
      exit(1);                                             \
    }                                                      \
  } while (0)

/* Seconds. */
static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
