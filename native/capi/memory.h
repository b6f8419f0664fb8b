// The object behind putget_memory.
#pragma once

#include "backend.h"

struct putget_memory {
  std::shared_ptr<putget::Backend> backend;
  uint32_t objects_made;
  unsigned long long* tables_apart;
  uint64_t rows_end;  // of all objects made
};
