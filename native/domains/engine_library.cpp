#include "domains/engine_library.h"

#include <dlfcn.h>

#include "error.h"

namespace putget::proxy {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(PUTGET_UNAVAILABLE, "the transfer engine " + path + why);
}

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) refuse(path, std::string(" has no function ") + name + ": it is of another version");
}

}  // namespace

EngineLibrary::EngineLibrary(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const words = dlerror();
    refuse(path, std::string(" cannot be loaded: ") + (words == nullptr ? "for no reason" : words));
  }
  decltype(&::pt_abi_version) version = nullptr;
  find(library, path, "pt_abi_version", version);
  if (version() != PT_ABI_VERSION) {
    refuse(path, " has ABI version " + std::to_string(version()) + ", needed is " + std::to_string(PT_ABI_VERSION));
  }
#define PUTGET_ENGINE_FIND(name) find(library, path, #name, this->name);
  PUTGET_ENGINE_FUNCTIONS(PUTGET_ENGINE_FIND)
#undef PUTGET_ENGINE_FIND
}

void EngineLibrary::check(int status, const std::string& what) const {
  if (status == PT_OK) return;
  const bool is_missing = status == PT_UNAVAILABLE;
  throw Error(status == PT_INVALID ? PUTGET_INVALID : (is_missing ? PUTGET_UNAVAILABLE : PUTGET_SYSTEM),
              what + ": " + pt_last_error());
}

}  // namespace putget::proxy
