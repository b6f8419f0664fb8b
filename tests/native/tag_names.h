// Enumerators by name, for command lines: a new tag or join needs no line here.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

namespace putget::stress {

constexpr uint32_t kMostTags = 32;
constexpr uint32_t kNoSuchTag = ~0u;

// The enumerator's name, from the compiler.
template <auto enumerator>
std::string_view name_of() {
  std::string_view text = __PRETTY_FUNCTION__;
  const std::string_view marker = "enumerator = ";
  text = text.substr(text.find(marker) + marker.size());
  text = text.substr(0, text.find_first_of(";]"));
  if (text.front() == '(') return {};  // a cast: no enumerator has this value
  return text.substr(text.rfind(':') + 1);
}

template <class Enum, uint32_t... index>
uint32_t value_named(std::string_view name, std::integer_sequence<uint32_t, index...>) {
  uint32_t found = kNoSuchTag;
  ((name_of<static_cast<Enum>(index)>() == name ? void(found = index) : void()), ...);
  return found;
}

// kNoSuchTag where there is none.
template <class Enum>
uint32_t value_named(std::string_view name) {
  return value_named<Enum>(name, std::make_integer_sequence<uint32_t, kMostTags>());
}

}  // namespace putget::stress
