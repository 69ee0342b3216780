#include "checkpoint/s3_text.h"

#include "support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::s3_text_test {
namespace {

using namespace files::s3;
using fsdp2::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(S3Text, FindsElementsAndTheirText) {
  const std::string xml =
      "<?xml version='1.0'?><ListBucketResult xmlns='http://a/'><Name>runs</Name>"
      "<Contents><Key>a&amp;b &#252;&lt;&#x1F600;</Key></Contents><Contents><Key>c</Key></Contents>"
      "<IsTruncated>true</IsTruncated></ListBucketResult>";
  const auto contents = elements(xml, "Contents");
  ASSERT_EQ(contents.size(), 2U);
  EXPECT_EQ(text_of(contents[0], "Key"), "a&b \xc3\xbc<\xf0\x9f\x98\x80");
  EXPECT_EQ(text_of(contents[1], "Key"), "c");
  EXPECT_EQ(text_of(xml, "IsTruncated"), "true");
  EXPECT_EQ(text_of(xml, "Code"), "");
  // Cut short or not XML at all: what can be found.
  EXPECT_THAT(elements("<Key>a</Key><Key>b", "Key"), ElementsAre("a"));
  EXPECT_EQ(text_of("<Key>a&am</Key>", "Key"), "a");
}

TEST(S3Text, EncodesAsSignaturesWantIt) {
  EXPECT_EQ(percent_encoded("a/b c~d\xc3\xbc+=", true), "a/b%20c~d%C3%BC%2B%3D");
  EXPECT_EQ(percent_encoded("a/b", false), "a%2Fb");
}

TEST(S3Text, TakesUrlsApart) {
  const Location location = location_of("s3://runs/a/step_1/");
  EXPECT_EQ(location.bucket, "runs");
  EXPECT_EQ(location.key, "a/step_1");
  EXPECT_EQ(location.prefix(), "a/step_1/");
  EXPECT_EQ(location_of("s3://runs").prefix(), "");
  for (const char* wrong : {"s3://", "s3:///a", "s3://host:80@evil/a"}) {
    EXPECT_THAT(error_of([&] { location_of(wrong); }),
                AllOf(HasSubstr(wrong), HasSubstr("s3://BUCKET/PREFIX")));
  }
}

}  // namespace
}  // namespace fsdp2::s3_text_test
