// The transfer engine's C functions, from a library that is loaded when somebody asks for a network.
#pragma once

#include <string>

#include "putget_transfer.h"

namespace putget::proxy {

// clang-format off
#define PUTGET_ENGINE_FUNCTIONS(each)                                                                              \
  each(pt_last_error) each(pt_engine_create) each(pt_engine_share) each(pt_engine_destroy) each(pt_engine_address) \
  each(pt_reserve_imms) each(pt_imms_destroy) each(pt_reg_mrs) each(pt_mr_describe) each(pt_mr_destroy) each(pt_desc_create) each(pt_desc_destroy)              \
  each(pt_add_peer_group) each(pt_group_destroy) each(pt_imm_word)                                                 \
  each(pt_poster_create) each(pt_poster_destroy) each(pt_post_write)
// clang-format on

// It stays loaded as long as the process lives: threads of an engine may be on their way out of it.
class EngineLibrary {
 public:
  // Throws Error with PUTGET_UNAVAILABLE, and names the file, if it is not there, of another ABI version, or without a
  // function.
  explicit EngineLibrary(const std::string& path);

#define PUTGET_ENGINE_MEMBER(name) decltype(&::name) name = nullptr;
  PUTGET_ENGINE_FUNCTIONS(PUTGET_ENGINE_MEMBER)
#undef PUTGET_ENGINE_MEMBER

  // Throws Error with `what` and the engine's words unless `status` is PT_OK.
  void check(int status, const std::string& what) const;
};

}  // namespace putget::proxy
