// The copy engine of an emulated grid: bulk copies between everybody's memory and shared memory, at any moment after
// they have been asked for, and the barriers in shared memory that count their bytes.
//
// ThreadSanitizer takes it for two threads. What reads for a load has seen what the asking thread had seen at its last
// fence for bulk copies; what else the engine does has seen all that this thread had done.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "emulated/fibers.h"

namespace putget::emulated {

// What a thread asks for, one thing at a time.
struct BulkRequest {
  enum Kind : uint32_t { kInit, kExpect, kHasEnded, kLoad, kStore, kCloseGroup, kHaveRead, kHaveWritten };

  Left<Kind> kind;
  Left<uint32_t> number;  // arrivals, bytes, a parity, groups that may still be under way
  Left<const void*> from;
  Left<void*> to;
  Left<void*> barrier;
  Left<bool> asked;
  Left<bool> yes;  // the answer
  // Tokens: what happened before copies, before loads of global memory; after reading, after writing.
  char issued = 0, fenced = 0, read = 0, written = 0;
};

class BulkEngine {
 public:
  bool is_idle() const { return copies_.empty(); }
  // Whether shared memory is read or written for this thread.
  bool reads_for(const BulkRequest& by) const {
    for (const Copy& copy : copies_) {
      if (copy.by == &by && !copy.has_read) return true;
    }
    return false;
  }

  // A step of one of the copies.
  void work(uint64_t lot) {
    Copy& copy = copies_[lot % copies_.size()];
    home_ = this_fiber();
    reader_ = reader();
    writer_ = writer();
    if (copy.barrier != nullptr) {
      load(copy);
      Barrier& barrier = barriers_.at(copy.barrier);
      barrier.bytes -= copy.bytes;
      barrier.settle();
    } else if (!copy.has_read) {
      copy.has_read = true;
      copy.words.resize(copy.bytes / sizeof(uint64_t));
      read_shared(copy, copy.words.data());
      return;
    } else {
      write_global(copy, copy.words.data());
    }
    copies_.erase(copies_.begin() + (&copy - copies_.data()));
  }

  void serve(BulkRequest& request) {
    request.yes.set(does(request));
    request.asked.set(false);
  }

 private:
  struct Copy {
    BulkRequest* by;
    const void* from;
    void* to;
    uint32_t bytes;
    void* barrier;   // of a load
    uint32_t group;  // of a store
    bool has_read;   // a store, which has not written
    std::vector<uint64_t> words;
  };
  struct NamedFiber {
    NamedFiber() = default;
    ~NamedFiber() { end_fiber(name); }
    NamedFiber(const NamedFiber&) = delete;             // it is known by its name
    NamedFiber& operator=(const NamedFiber&) = delete;  // it is known by its name
    void* name = make_fiber();
  };
  struct Barrier {
    uint32_t of;
    uint32_t arrivals;  // to come
    int64_t bytes;      // to come
    uint32_t phase;
    void settle() {
      if (arrivals != 0 || bytes != 0) return;
      arrivals = of;
      ++phase;
    }
  };

  bool does(BulkRequest& request) {
    const uint32_t number = request.number.get();
    void* barrier = request.barrier.get();
    uint32_t& group = group_of_[&request];
    switch (request.kind.get()) {
      case BulkRequest::kInit:
        barriers_[barrier] = Barrier{number, number, 0, 0};
        return true;
      case BulkRequest::kExpect:
        barriers_.at(barrier).bytes += number;
        --barriers_.at(barrier).arrivals;
        barriers_.at(barrier).settle();
        return true;
      case BulkRequest::kHasEnded:
        return (barriers_.at(barrier).phase & 1u) != number;
      case BulkRequest::kLoad:
        copies_.push_back({&request, request.from.get(), request.to.get(), number, barrier, 0, false, {}});
        return true;
      case BulkRequest::kStore:
        copies_.push_back({&request, request.from.get(), request.to.get(), number, nullptr, group, false, {}});
        return true;
      case BulkRequest::kCloseGroup:
        ++group;
        return true;
      case BulkRequest::kHaveRead:
      case BulkRequest::kHaveWritten:
        for (const Copy& copy : copies_) {
          const bool waits = copy.by == &request && copy.barrier == nullptr && copy.group + number < group;
          if (waits && !(copy.has_read && request.kind.get() == BulkRequest::kHaveRead)) return false;
        }
        return true;
    }
    return true;
  }

  // Of the CPU thread that launches, for all of its launches: a fiber that is made later has seen what its maker had.
  static void* reader() {
    static thread_local const NamedFiber fiber;
    return fiber.name;
  }
  static void* writer() {
    static thread_local const NamedFiber fiber;
    return fiber.name;
  }

  // Not instrumented: what these have of their own would be done in the name of a fiber of the engine.
  [[gnu::no_sanitize("thread")]] void load(const Copy& copy) {
    for (uint32_t i = 0; i < copy.bytes / sizeof(uint64_t); ++i) {
      about_to_switch(reader_);
      if (i == 0) acquire_at(&copy.by->fenced);
      const uint64_t word = read_word(copy.from, i);
      about_to_switch(writer_);
      if (i == 0) acquire_at(&copy.by->issued);
      write_word(copy.to, i, word);
    }
    about_to_switch(reader_);
    release_at(&has_been_read_);
    about_to_switch(writer_);
    acquire_at(&has_been_read_);
    release_at(copy.barrier);
    about_to_switch(home_);
  }
  [[gnu::no_sanitize("thread")]] void read_shared(const Copy& copy, uint64_t* words) {
    about_to_switch(writer_);
    acquire_at(&copy.by->issued);
    for (uint32_t i = 0; i < copy.bytes / sizeof(uint64_t); ++i) words[i] = read_word(copy.from, i);
    release_at(&copy.by->read);
    about_to_switch(home_);
  }
  [[gnu::no_sanitize("thread")]] void write_global(const Copy& copy, const uint64_t* words) {
    about_to_switch(writer_);
    for (uint32_t i = 0; i < copy.bytes / sizeof(uint64_t); ++i) write_word(copy.to, i, words[i]);
    release_at(&copy.by->written);
    about_to_switch(home_);
  }
  [[gnu::noinline]] static uint64_t read_word(const void* from, uint32_t index) {
    return static_cast<const uint64_t*>(from)[index];
  }
  [[gnu::noinline]] static void write_word(void* to, uint32_t index, uint64_t word) {
    static_cast<uint64_t*>(to)[index] = word;
  }

  // Those who act: whoever launches, and the two of the engine.
  void* home_ = nullptr;
  void* reader_ = nullptr;
  void* writer_ = nullptr;
  char has_been_read_ = 0;  // token
  std::vector<Copy> copies_;
  std::map<const void*, Barrier> barriers_;
  std::map<const BulkRequest*, uint32_t> group_of_;
};

}  // namespace putget::emulated
