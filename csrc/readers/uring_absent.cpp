// Stands in for uring_reader.cpp where liburing is missing.
#include "readers/uring_reader.h"

namespace weightlift {

std::unique_ptr<Reader> make_uring_reader(const UringOptions&, std::string* refusal) {
  *refusal = "this build has no liburing";
  return nullptr;
}

}  // namespace weightlift
